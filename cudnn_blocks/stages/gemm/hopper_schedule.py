# SPDX-License-Identifier: Apache-2.0
"""Static persistent schedule of the Hopper GEMM kernel, and the place of a thread in a tile.

A *unit* is what one cluster computes at a time: ``cluster_m x cluster_n`` neighbouring tiles. Units
follow each other in groups of ``raster_group`` tiles along M, M fastest in a group, then N, back
and forth, so that the operands of a wave stay in L2. Cluster ``i`` takes the items ``i``,
``i + num_clusters`` and so on; every role of every CTA walks the same items, so that their stage
counts agree. The first ``num_whole`` items are units; what is left of them, if it fills at most
half a wave, follows as two items a unit, the upper half of its rows and the lower one.

Tiles past the edges lie outside the tensors: TMA fills them with zeros, and stores drop them.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cudnn_blocks.stages.gemm.hopper_config import (
    MMA_M,
    WARP_ROWS,
    WARP_THREADS,
    WARPGROUP_THREADS,
    Fragment,
    GemmKernelConfig,
)


@dataclass(frozen=True)
class TileExtents:
    """What a launch adds to the config."""

    units_m: Int32
    units_n: Int32
    num_whole: Int32
    """Items that are whole units."""
    num_items: Int32

    @classmethod
    def of(cls, cfg: GemmKernelConfig, m: Int32, n: Int32) -> "TileExtents":
        """Extents for an ``M x N`` result."""
        tile = cfg.tile
        units_m = (m - 1) // (tile.m * tile.cluster_m) + 1
        units_n = (n - 1) // (tile.n * tile.cluster_n) + 1
        num_units = units_m * units_n
        num_split = Int32(0)
        if const_expr(tile.splits_tail):
            num_split = short_wave(num_units, cfg.num_clusters)
        return cls(units_m, units_n, num_units - num_split, num_units + num_split)


@cute.jit
def short_wave(num_units: Int32, num_clusters: cutlass.Constexpr[int]) -> Int32:
    """Units of the last wave, if two clusters are there for each; else 0."""
    rest = num_units % num_clusters
    return rest if 2 * rest <= num_clusters else Int32(0)


@dataclass(frozen=True)
class TileOrigin:
    """Where one CTA's tile, or its half of a split tile, starts."""

    row: Int32
    column: Int32


@dataclass(frozen=True)
class TileSchedule:
    """The items of one CTA: ``first_item``, then every ``num_clusters``-th below ``num_items``."""

    config: GemmKernelConfig
    extents: TileExtents
    first_item: Int32
    """Index of the CTA's cluster."""
    rank_m: Int32
    rank_n: Int32
    """Place of the CTA in its cluster."""

    @cute.jit
    def tile(self, item: Int32) -> TileOrigin:
        """This CTA's part of an item."""
        tile, num_whole = self.config.tile, self.extents.num_whole
        unit, row, rows = item, Int32(0), Int32(tile.m)
        if const_expr(tile.splits_tail):
            if item >= num_whole:
                half = item - num_whole
                unit = num_whole + half // 2
                row = half % 2 * (tile.m // 2 * tile.cluster_m)
                rows = Int32(tile.m // 2)
        unit_m, unit_n = self.unit_position(unit)
        row += unit_m * (tile.m * tile.cluster_m) + self.rank_m * rows
        return TileOrigin(row, (unit_n * tile.cluster_n + self.rank_n) * tile.n)

    @cute.jit
    def unit_position(self, unit: Int32) -> tuple[Int32, Int32]:
        """(M, N) of a unit, in units; the last group may be narrower."""
        units_m, units_n = self.extents.units_m, self.extents.units_n
        width = self.config.tile.raster_group // self.config.tile.cluster_m
        group = unit // (width * units_n)
        first = group * width
        rest = unit - first * units_n
        narrow = cutlass.min(units_m - first, width)
        n = rest // narrow
        m = first + rest - n * narrow
        n = units_n - 1 - n if group % 2 == 1 else n
        return m, n


@dataclass(frozen=True)
class Thread:
    """Place of a consumer thread in the accumulator."""

    tidx: Int32
    warpgroup: Int32

    @property
    def lane(self) -> Int32:
        """Within the warp."""
        return self.tidx % WARP_THREADS

    @property
    def quad_lane(self) -> Int32:
        """Which two of every 8 columns."""
        return self.tidx % 4

    @property
    def warp(self) -> Int32:
        """Within the CTA."""
        return self.tidx // WARP_THREADS

    def block_row(self, fragment: Fragment, block: int) -> Int32:
        """First row of the CTA tile that this thread's warp holds of its warpgroup's block."""
        block = block * fragment.warpgroups_m
        if fragment.warpgroups_m > 1:
            block += self.warpgroup
        return block * MMA_M + self.tidx % WARPGROUP_THREADS // WARP_THREADS * WARP_ROWS

    def first_column(self, fragment: Fragment, origin: TileOrigin) -> Int32:
        """First column of the result that this warpgroup holds."""
        if fragment.warpgroups_n > 1:
            return origin.column + self.warpgroup * fragment.columns
        return origin.column
