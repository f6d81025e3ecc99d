# SPDX-License-Identifier: Apache-2.0
"""Packing of a raw video chunk for the causal convolution 12 -> 160 (sm_80 and newer).

    padded_input = 2 - P zero planes, ``previous``, ``input``, each with a zero border of one pixel;
                   NTHWC with 16 channels, of which the last four are zero
    cache_output = the last min(2, T + P) frames of ``previous``, ``input``; NTHWC with 12 channels

Bits are moved, none is computed.

Grid:      x only, over the pixels ("sites") of ``padded_input`` in the order of memory, one a
           thread.
Threads:   a thread reads its pixel's 12 channels one by one, neighbours along W side by side,
           whatever the strides are; all loads are issued before the first use. Neighbouring lanes
           then trade halves of their pixels, so that a pair's 16-byte stores fill 32-byte sectors.
Overlap:   with PDL the next grid may start at once; all memory is touched after the wait.
Requires:  ``input`` of any strides, 2-byte aligned; ``previous`` and ``cache_output`` 8-byte and
           ``padded_input`` 16-byte aligned, contiguous; at most 2**31 - 2**16 sites.
Source:    written for this project; behaviour after the causal convolution of cudnn-frontend.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from cudnn_blocks.stages.conv3d_input.pack_portable_config import CausalPackConfig
from cudnn_blocks.stages.device.padded_sites import PaddedSites, Site

CHANNELS = 12
PADDED_CHANNELS = 16
VEC = 8  # channels of one 16-byte store
PAIRS = 4  # registers of one store
HISTORY_WORDS = 3  # 8-byte words of one history pixel


class CausalPackKernel:
    """Chunk and history into ``padded_input`` and the cache; see the module docstring."""

    def __init__(self, config: CausalPackConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        input: cute.Tensor,
        padded_input: cute.Tensor,
        cache_output: cute.Tensor,
        previous: cute.Tensor | None,
        stream,
    ):
        cfg = self.config
        history_frames = Int32(0) if const_expr(previous is None) else previous.shape[1]
        sites = PaddedSites.of(padded_input, history_frames, cache_output.shape[1])
        self.kernel(input, padded_input, cache_output, previous, sites).launch(
            grid=((sites.num_sites - 1) // cfg.threads + 1, 1, 1),
            block=(cfg.threads, 1, 1),
            stream=stream,
            use_pdl=cfg.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mY: cute.Tensor,
        mCache: cute.Tensor,
        mPrevious: cute.Tensor | None,
        sites: PaddedSites,
    ):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        site = sites.site(bidx * cfg.threads + tidx)

        rPixel = cute.make_rmem_tensor((PAIRS, PADDED_CHANNELS // VEC), Int32)
        rPixel.fill(0)
        if site.is_current:
            self.load_current(mX, site, rPixel)
        if const_expr(cfg.has_previous):
            if site.is_history:
                gPixel = self.history_view(mPrevious, site.history_row)
                cute.autovec_copy(gPixel, self.history_words(rPixel))
        self.store_padded(rPixel, mY, site.padded_row, sites.num_sites)
        if site.is_cached:
            cute.autovec_copy(self.history_words(rPixel), self.history_view(mCache, site.cache_row))

    @cute.jit
    def load_current(self, mX: cute.Tensor, site: Site, rPixel: cute.Tensor):
        """The 12 channels of a pixel; offsets and strides have 64 bits."""
        stride_n, stride_c, stride_t, stride_h, stride_w = mX.stride
        pixel = Int64(site.n) * stride_n + Int64(site.t) * stride_t
        pixel += Int64(site.h) * stride_h + Int64(site.w) * stride_w
        rX = cute.make_rmem_tensor(PADDED_CHANNELS, BFloat16)
        rX.fill(0.0)
        for c in cutlass.range_constexpr(CHANNELS):
            gX = cute.make_tensor(mX.iterator + (pixel + c * Int64(stride_c)), cute.make_layout(1))
            rC = cute.make_tensor(rX.iterator + c, cute.make_layout(1))
            cute.autovec_copy(gX, rC)
        rPixel.store(cute.recast_tensor(rX, Int32).load().reshape(rPixel.shape))

    @cute.jit
    def store_padded(self, rPixel: cute.Tensor, mY: cute.Tensor, row: Int32, num_rows: Int32):
        """A pair of lanes stores its even pixel, then its odd one, each lane one half of both."""
        is_odd = row % 2 != 0
        rEven = cute.make_rmem_tensor(PAIRS, Int32)
        rOdd = cute.make_rmem_tensor(PAIRS, Int32)
        for i in cutlass.range_constexpr(PAIRS):
            low, high = rPixel[i, 0], rPixel[i, 1]
            other = cute.arch.shuffle_sync_bfly(low if is_odd else high, 1)
            rEven[i] = other if is_odd else low
            rOdd[i] = high if is_odd else other
        even = row - row % 2
        gY = self.half_view(mY, even, row % 2)
        if even < num_rows:
            cute.autovec_copy(rEven, gY[None, 0])
        if even + 1 < num_rows:
            cute.autovec_copy(rOdd, gY[None, 1])

    @cute.jit
    def half_view(self, mY: cute.Tensor, row: Int32, half: Int32) -> cute.Tensor:
        """(PAIR, ROW) of one half of two rows."""
        offset = cute.assume(Int64(row) * PADDED_CHANNELS + Int64(half * VEC), divby=VEC)
        layout = cute.make_layout((PAIRS, 2), stride=(1, 2 * PAIRS))
        return cute.make_tensor(cute.recast_ptr(mY.iterator + offset, dtype=Int32), layout)

    @cute.jit
    def history_view(self, mX: cute.Tensor, row: Int32) -> cute.Tensor:
        """The 8-byte words of a row of 12 channels."""
        offset = cute.assume(Int64(row) * CHANNELS, divby=4)
        return cute.make_tensor(
            cute.recast_ptr(mX.iterator + offset, dtype=Int64), cute.make_layout(HISTORY_WORDS)
        )

    def history_words(self, rPixel: cute.Tensor) -> cute.Tensor:
        """The registers of the first 12 channels."""
        words = cute.recast_tensor(rPixel, Int64)
        return cute.make_tensor(words.iterator, cute.make_layout(HISTORY_WORDS))


def fake_operands(config: CausalPackConfig) -> tuple:
    """Fake tensors in ``__call__`` order, without the stream; extents and strides are dynamic."""
    n, h, w = (cute.sym_int() for _ in range(3))

    def contiguous(*shape, align):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(BFloat16, shape, stride_order=order, assumed_align=align)

    strides = tuple(cute.sym_int64() for _ in range(5))
    padded = (n, cute.sym_int(), cute.sym_int(), cute.sym_int(), PADDED_CHANNELS)
    return (
        make_fake_tensor(BFloat16, (n, CHANNELS, cute.sym_int(), h, w), strides, assumed_align=2),
        contiguous(*padded, align=16),
        contiguous(n, cute.sym_int(), h, w, CHANNELS, align=8),
        contiguous(n, cute.sym_int(), h, w, CHANNELS, align=8) if config.has_previous else None,
    )
