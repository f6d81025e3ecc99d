# SPDX-License-Identifier: Apache-2.0
"""Static persistent schedule of the Hopper Conv3D kernel.

A *unit* is what one cluster computes at a time: ``cluster_m`` neighbouring pixel tiles, one pass of
output channels. Passes are fastest, then W, H, T, N. Cluster ``i`` takes the units ``i``,
``i + num_clusters`` and so on; all roles of all its CTAs walk the same units, so that their stage
counts agree. Tiles past the last one lie outside the tensors: TMA fills them with zeros, and stores
drop them.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cudnn_blocks.stages.conv3d.hopper_config import BLOCK_SIDE, NUM_PLANES, Conv3dKernelConfig


@dataclass(frozen=True)
class OutputTile:
    """Where one CTA's tile starts."""

    n: Int32
    t: Int32
    h: Int32
    w: Int32
    channel_tile: Int32
    """In units of ``n_tile`` output channels."""


@dataclass(frozen=True)
class TileExtents:
    """What a launch adds to the config; ``tiles_*`` and ``frames`` are fast divisors."""

    tiles_w: cute.FastDivmodDivisorV2
    tiles_h: cute.FastDivmodDivisorV2
    frames: cute.FastDivmodDivisorV2
    num_units: Int32

    @classmethod
    def of_output(cls, cfg: Conv3dKernelConfig, mO: cute.Tensor) -> "TileExtents":
        """Extents for an output seen at its ``[N, T, H, W, Co]`` valid sites."""
        n, t, h, w, _ = mO.shape
        tiles_w = (w - 1) // cfg.tile.width + 1
        tiles_h = (h - 1) // cfg.tile.height + 1
        num_groups = (n * t * tiles_h * tiles_w + cfg.tile.cluster_m - 1) // cfg.tile.cluster_m
        divisor = cute.fast_divmod_create_divisor_v2
        return cls(divisor(tiles_w), divisor(tiles_h), divisor(t), num_groups * cfg.num_passes)


@dataclass(frozen=True)
class TileSchedule:
    """The units of one CTA: ``first_unit``, then every ``num_clusters``-th below ``num_units``."""

    config: Conv3dKernelConfig
    extents: TileExtents
    first_unit: Int32
    """Index of the CTA's cluster."""
    cta_rank: Int32
    """Place of the CTA in its cluster."""

    @property
    def num_units(self) -> Int32:
        """Units of the launch."""
        return self.extents.num_units

    @cute.jit
    def tile(self, unit: Int32) -> OutputTile:
        """This CTA's tile of a unit."""
        return self.tile_of(unit, self.cta_rank)

    @cute.jit
    def tile_of(self, unit: Int32, cta_rank: Int32) -> OutputTile:
        """The tile of any CTA of the cluster."""
        cfg = self.config
        pixel_tile, channel_tile = unit, Int32(0)
        if const_expr(cfg.num_passes > 1):
            pixel_tile = unit // cfg.num_passes
            channel_tile = unit - pixel_tile * cfg.num_passes
        if const_expr(cfg.tile.cluster_m > 1):
            pixel_tile = pixel_tile * cfg.tile.cluster_m + cta_rank
        if const_expr(cfg.tile.cluster_n > 1):
            channel_tile = channel_tile * cfg.tile.cluster_n + cta_rank
        row, w = divmod(pixel_tile, self.extents.tiles_w)
        plane, h = divmod(row, self.extents.tiles_h)
        n, t = divmod(plane, self.extents.frames)
        return OutputTile(n, t, h * cfg.tile.height, w * cfg.tile.width, channel_tile)

    @cute.jit
    def first_plane(self, unit: Int32) -> Int32:
        """First filter plane that reads a frame not known to be zero; the last plane always does.

        One value for the cluster, the earliest of its tiles: they share weight stages.
        """
        cfg = self.config
        first = Int32(0)
        if const_expr(cfg.zero_leading_frames > 0):
            first = Int32(NUM_PLANES - 1)
            for rank in cutlass.range_constexpr(cfg.tile.cluster_m):
                skipped = cfg.zero_leading_frames - self.tile_of(unit, Int32(rank)).t
                first = cutlass.min(first, cutlass.max(skipped, 0))
        return first

    @cute.jit
    def halo_frame(self, tile: OutputTile, plane: Int32) -> Int32:
        """The input frame of a filter plane; out of range, so read as zero, for a hinted one.

        A tile meets a hinted frame where another tile of its cluster needs an earlier plane.
        """
        cfg = self.config
        frame = tile.t + plane
        if const_expr(cfg.zero_leading_frames > 0 and cfg.tile.cluster_m > 1):
            frame = frame if frame >= cfg.zero_leading_frames else Int32(-1)
        return frame


def block_origin(cfg: Conv3dKernelConfig, tile: OutputTile, block: Int32) -> tuple:
    """(C, W, H, T, N) of the first output of an 8 x 8 block."""
    w = tile.w + block % cfg.blocks_per_row * BLOCK_SIDE
    h = tile.h + block // cfg.blocks_per_row * BLOCK_SIDE
    return (tile.channel_tile * cfg.tile.n_tile, w, h, tile.t, tile.n)
