# SPDX-License-Identifier: Apache-2.0
"""Zeros around the valid output of the Hopper Conv3D kernel, by the warps beside the load warp."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Int32, Int64, const_expr

from cudnn_blocks.stages.conv3d.epilogues import NORM_PAD
from cudnn_blocks.stages.conv3d.hopper_config import WARP_THREADS, Conv3dKernelConfig

VEC = 8  # channels of one 16-byte store
LEADING_FRAMES = 2  # of a padded output


@dataclass(frozen=True)
class BorderRole:
    """Zeros what the epilogues leave out, apart from existing history.

    ``norm_pad``: the four sides of every frame, and the frames before the history.
    ``bias_residual_pad``: the bottom row and the right column.
    """

    config: Conv3dKernelConfig

    @cute.jit
    def run(self, mO: cute.Tensor, lane: Int32, worker: Int32):
        """All planes, each split over the border warps of the grid."""
        cfg = self.config
        frames = mO.shape[1]
        for plane in cutlass.range(mO.shape[0] * frames, unroll=1):
            n = plane // frames
            t = plane - n * frames
            gO = mO[n, t, None, None, None]
            is_missing = Boolean(False)
            if const_expr(cfg.epilogue == NORM_PAD):
                is_missing = t < LEADING_FRAMES - cfg.history_frames
            if is_missing:
                self.zero_plane(gO, lane, worker)
            else:
                self.zero_border(gO, lane, worker)

    @cute.jit
    def zero_plane(self, gO: cute.Tensor, lane: Int32, worker: Int32):
        """A whole frame, which is contiguous: 512 bytes per warp and store."""
        num_elements = Int64(gO.shape[0]) * gO.shape[1] * self.config.out_channels
        step = self.config.num_border_warps * WARP_THREADS * VEC
        first = Int64((worker * WARP_THREADS + lane) * VEC)
        for offset in cutlass.range(first, num_elements, step, unroll=1):
            store_zeros(gO, offset)

    @cute.jit
    def zero_border(self, gO: cute.Tensor, lane: Int32, worker: Int32):
        """The border of a frame, one pixel per warp and step."""
        height, width, channels = Int32(gO.shape[0]), Int32(gO.shape[1]), self.config.out_channels
        num_pixels = 2 * (width + height) - 4
        if const_expr(self.config.epilogue != NORM_PAD):
            num_pixels = width + height - 1
        for pixel in cutlass.range(worker, num_pixels, self.config.num_border_warps, unroll=1):
            h, w = self.border_pixel(pixel, height, width)
            offset = cute.crd2idx((h, w, lane * VEC), gO.layout)
            for first in cutlass.range_constexpr(0, channels, VEC * WARP_THREADS):
                if first + lane * VEC < channels:
                    store_zeros(gO, offset + first)

    @cute.jit
    def border_pixel(self, pixel: Int32, height: Int32, width: Int32) -> tuple[Int32, Int32]:
        """(h, w): the horizontal sides first, then the vertical ones between them."""
        beyond = pixel - width
        if const_expr(self.config.epilogue == NORM_PAD):
            h = Int32(0) if beyond < 0 else height - 1
            w = pixel if beyond < 0 else beyond
            beyond = beyond - width
            h = h if beyond < 0 else 1 + beyond // 2
            w = w if beyond < 0 else beyond % 2 * (width - 1)
        else:
            h = height - 1 if beyond < 0 else beyond
            w = pixel if beyond < 0 else width - 1
        return h, w


@cute.jit
def store_zeros(gO: cute.Tensor, offset: Int64):
    """16 bytes at a multiple of 16 bytes."""
    rZero = cute.make_rmem_tensor(VEC, BFloat16)
    rZero.fill(0.0)
    vec = cute.make_tensor(gO.iterator + cute.assume(offset, divby=VEC), cute.make_layout(VEC))
    cute.autovec_copy(rZero, vec)
