# SPDX-License-Identifier: Apache-2.0
"""Static persistent schedule of the Hopper SDPA kernel, and what the mask leaves of a tile.

A *unit* is a cluster's query heads of one batch entry. The units are cut into sections whose keys
and values stay in L2. Within a section tiles are ordered by row, so that their cost falls from the
last row of a causal mask to the first, or rises in every second section: it has no jump between
sections, and it falls at the end. Clusters take the tiles in turn, forwards in even rounds and
backwards in odd ones. Two rounds then cost every cluster the same, up to a few rows, and nothing in
memory has to count tiles.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from cudnn_blocks.stages.attention.hopper_config import (
    L2_SECTION_BYTES,
    MMA_M,
    TILE_M,
    SdpaConfig,
)


@dataclass(frozen=True)
class QueryTile:
    """128 query rows of one head."""

    row_tile: Int32
    head: Int32
    batch: Int32


@dataclass(frozen=True)
class KeyRange:
    """Blocks of keys that a tile visits, from the last to the first; never none.

    A tile that sees no key visits a block all of which is masked.
    """

    first: Int32
    last: Int32
    """One past the last block."""
    length: Int32
    """Keys of the batch entry."""

    @property
    def num_blocks(self) -> Int32:
        """At least 1."""
        return self.last - self.first


@dataclass(frozen=True)
class Extents:
    """What a launch adds to the config."""

    seqlen_q: Int32
    seqlen_k: Int32
    num_clusters: Int32
    """Clusters of this launch: no more than there are tiles."""
    num_tiles: Int32
    """Of the rank that a CTA has in its cluster."""
    num_row_tiles: Int32
    num_sections: Int32
    section_tiles: cute.FastDivmodDivisorV2
    section_units: cute.FastDivmodDivisorV2
    """Units of every section but the last."""
    last_section_units: cute.FastDivmodDivisorV2

    @classmethod
    def of(cls, cfg: SdpaConfig, mQ: cute.Tensor, mK: cute.Tensor) -> "Extents":
        """Sections of as many whole groups of query heads as L2 holds keys and values of."""
        seqlen_q, seqlen_k = mQ.shape[1], mK.shape[1]
        num_row_tiles = (seqlen_q - 1) // TILE_M + 1
        key_bytes = 2 * cfg.d_head * cfg.element_bytes
        groups = mK.shape[0] * cfg.h_kv
        fitting = cutlass.max(L2_SECTION_BYTES // key_bytes // seqlen_k, 1)
        num_sections = (groups - 1) // fitting + 1
        section_groups = (groups - 1) // num_sections + 1
        num_sections = (groups - 1) // section_groups + 1
        group_units = cfg.head_units // cfg.h_kv
        section_units = section_groups * group_units
        num_units = groups * group_units
        num_tiles = num_units * num_row_tiles
        divisor = cute.fast_divmod_create_divisor_v2
        return cls(
            seqlen_q,
            seqlen_k,
            cutlass.min(num_tiles, cfg.num_clusters),
            num_tiles,
            num_row_tiles,
            num_sections,
            divisor(section_units * num_row_tiles),
            divisor(section_units),
            divisor(num_units - (num_sections - 1) * section_units),
        )


@dataclass(frozen=True)
class TileSchedule:
    """The tiles of one CTA: ``tile(place(0))``, ``tile(place(1))`` ... while ``has_tile``."""

    config: SdpaConfig
    extents: Extents
    mSeqLens: cute.Tensor | None
    cluster_index: Int32
    cta_rank: Int32

    @cute.jit
    def place(self, round_index: Int32) -> Int32:
        """Place of the cluster's next tile in the order of all."""
        last = self.extents.num_clusters - 1
        offset = self.cluster_index
        if round_index % 2 == 1:
            offset = last - self.cluster_index
        return round_index * self.extents.num_clusters + offset

    def has_tile(self, place: Int32) -> Boolean:
        """False from the end of the order on."""
        return place < self.extents.num_tiles

    @cute.jit
    def tile(self, place: Int32) -> QueryTile:
        """This CTA's tile of a place."""
        cfg, extents = self.config, self.extents
        section, within = divmod(place, extents.section_tiles)
        row, unit = divmod(within, extents.section_units)
        last_row, last_unit = divmod(within, extents.last_section_units)
        behind = extents.num_sections - 1 - section
        row = last_row if behind == 0 else row
        unit = last_unit if behind == 0 else unit
        row = row if behind % 2 == 1 else extents.num_row_tiles - 1 - row
        unit += section * extents.section_units.divisor
        batch = unit // cfg.head_units
        head = (unit - batch * cfg.head_units) * cfg.cluster + self.cta_rank
        return QueryTile(row, head, batch)

    @cute.jit
    def length(self, batch: Int32) -> Int32:
        """Keys of a batch entry."""
        length = self.extents.seqlen_k
        if const_expr(self.mSeqLens is not None):
            length = cutlass.max(cutlass.min(self.mSeqLens[batch], length), 0)
        return length

    def diagonal(self, length: Int32) -> Int32:
        """What is added to a query row for the key on its diagonal."""
        if self.config.causal_bottom_right:
            return length - self.extents.seqlen_q
        return Int32(0)

    @cute.jit
    def keys(self, tile: QueryTile) -> KeyRange:
        """Blocks that some row of the tile sees."""
        cfg = self.config
        n = cfg.tile.n
        length = self.length(tile.batch)
        diagonal = self.diagonal(length)
        end = length
        if const_expr(cfg.is_causal):
            rows = cutlass.min((tile.row_tile + 1) * TILE_M, self.extents.seqlen_q)
            end = cutlass.min(end, rows + diagonal + cfg.window_right)
        last = cutlass.max((end + (n - 1)) // n, 1)
        first = Int32(0)
        if const_expr(cfg.has_window_left):
            start = tile.row_tile * TILE_M + diagonal - cfg.window_left
            first = cutlass.min(cutlass.max(start, 0) // n, last - 1)
        return KeyRange(first, last, length)

    @cute.jit
    def masked_steps(
        self, row_tile: Int32, keys: KeyRange, warpgroup: Int32
    ) -> tuple[Int32, Int32]:
        """Steps ``[1, a)`` and ``[b, num_blocks)`` of a warpgroup meet the mask; 0 always does."""
        cfg = self.config
        n = cfg.tile.n
        row = row_tile * TILE_M + warpgroup * MMA_M + self.diagonal(keys.length)
        end = keys.length
        if const_expr(cfg.is_causal):
            end = cutlass.min(end, row + (cfg.window_right + 1))
        right = keys.last - cutlass.max(end, 0) // n
        right = cutlass.min(cutlass.max(right, 1), keys.num_blocks)
        left = keys.num_blocks
        if const_expr(cfg.has_window_left):
            start = row + (MMA_M - 1 - cfg.window_left)
            left = keys.last - (cutlass.max(start, 0) + (n - 1)) // n
            left = cutlass.max(cutlass.min(left, keys.num_blocks), right)
        return right, left
