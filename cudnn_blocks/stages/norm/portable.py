# SPDX-License-Identifier: Apache-2.0
"""L2 normalisation, SiLU and causal padding of an NTHWC activation (sm_80 and newer).

    value     = B(B(x + input_bias) + B(residual + residual_bias))   of what is given
    den       = max(sqrt(sum_c value**2), 1e-12)                     FP32, over a pixel's channels
    activated = B(silu(B(B(B(value / den) * sqrt(C)) * gamma)))      true division

    padded_output   = 2 - P zero planes, ``previous``, ``activated``, each with a zero border
    cache_output    = the last min(2, T + P) frames of ``previous``, ``activated``
    residual_output = value

Grid:      x only, over the pixels ("sites") of ``padded_output`` in the order of memory. Whatever a
           site holds, the same threads write it: every byte is written once, in whole lines, and no
           tile of H or W has to be filled. No shared memory.
Threads:   ``lanes`` neighbouring lanes own a site. Lane l holds the 16-byte vectors l, l + lanes
           ... of its channels, all loaded before the first use; the row sum is a butterfly. Lanes
           that hold a border or history site beside current ones join their arithmetic, on the
           first row of the input, and store nothing of it.
Overlap:   with PDL the next grid may start at once; all memory is touched after the wait.
Requires:  operands contiguous and 16-byte aligned; C a multiple of 8, up to 2048 (a lane then holds
           8 vectors); at most 2**31 - 2**16 sites.
Source:    written for this project; behaviour after the standalone normalisation of cudnn-frontend.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import CacheEvictionPriority
from cutlass.cute.runtime import make_fake_compact_tensor

from cudnn_blocks.stages.device.bf16 import widen
from cudnn_blocks.stages.device.padded_sites import PaddedSites, Site
from cudnn_blocks.stages.device.rounding import divide, row_divisor
from cudnn_blocks.stages.device.silu import silu_of_bf16
from cudnn_blocks.stages.norm.portable_config import VEC, RmsNormSiluPadConfig

PAIRS = 4  # registers of one access


@dataclass(frozen=True)
class Operands:
    """Global tensors, None where absent."""

    mX: cute.Tensor
    mGamma: cute.Tensor
    mY: cute.Tensor
    mCache: cute.Tensor
    mBias: cute.Tensor | None
    mPrevious: cute.Tensor | None
    mResidual: cute.Tensor | None
    mResidualBias: cute.Tensor | None
    mValue: cute.Tensor | None


class RmsNormSiluPadKernel:
    """Standalone post-operations of a convolution; see the module docstring."""

    def __init__(self, config: RmsNormSiluPadConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        input: cute.Tensor,
        gamma: cute.Tensor,
        padded_output: cute.Tensor,
        cache_output: cute.Tensor,
        input_bias: cute.Tensor | None,
        previous: cute.Tensor | None,
        residual: cute.Tensor | None,
        residual_bias: cute.Tensor | None,
        residual_output: cute.Tensor | None,
        stream,
    ):
        cfg = self.config
        history_frames = Int32(0) if const_expr(previous is None) else previous.shape[1]
        sites = PaddedSites.of(padded_output, history_frames, cache_output.shape[1])
        operands = Operands(
            input,
            gamma,
            padded_output,
            cache_output,
            input_bias,
            previous,
            residual,
            residual_bias,
            residual_output,
        )
        self.kernel(operands, sites).launch(
            grid=((sites.num_sites - 1) // cfg.sites_per_cta + 1, 1, 1),
            block=(cfg.threads, 1, 1),
            stream=stream,
            use_pdl=cfg.use_pdl,
        )

    @cute.kernel
    def kernel(self, operands: Operands, sites: PaddedSites):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        lane = tidx % cfg.lanes
        site = sites.site(bidx * cfg.sites_per_cta + tidx // cfg.lanes)

        if not site.is_current:
            self.copy_or_zero(operands, site, lane)
        if cute.arch.vote_any_sync(site.is_current):
            rV = self.value(operands, site, lane)
            self.normalise(rV, operands, site, lane)

    @cute.jit
    def copy_or_zero(self, operands: Operands, site: Site, lane: Int32):
        """History, border and missing planes."""
        rX = self.make_registers()
        rX.fill(0)
        if const_expr(self.config.has_previous):
            if site.is_history:
                self.load(operands.mPrevious, site.history_row, lane, rX, is_stream=True)
        self.store(rX, operands.mY, site.padded_row, lane, site.is_inside)
        if const_expr(self.config.has_previous):
            self.store(rX, operands.mCache, site.cache_row, lane, site.is_cached)

    @cute.jit
    def value(self, operands: Operands, site: Site, lane: Int32) -> cute.Tensor:
        """(PAIR, K): what the norm is taken of; also leaves as ``residual_output``."""
        cfg = self.config
        row = site.current_row if site.is_current else Int32(0)
        rV = self.load_row(operands.mX, row, lane, is_stream=True)
        if const_expr(cfg.has_residual):
            rR = self.load_row(operands.mResidual, row, lane, is_stream=True)
        if const_expr(cfg.has_input_bias):
            self.add(rV, self.load_row(operands.mBias, Int32(0), lane))
        if const_expr(cfg.has_residual):
            if const_expr(cfg.has_residual_bias):
                self.add(rR, self.load_row(operands.mResidualBias, Int32(0), lane))
            self.add(rV, rR)
        if const_expr(cfg.has_residual_output):
            self.store(rV, operands.mValue, row, lane, site.is_current)
        return rV

    @cute.jit
    def add(self, rX: cute.Tensor, rY: cute.Tensor):
        """``x = B(x + y)``: a BF16 addition rounds once; FP32 in between would change nothing."""
        x, y = cute.recast_tensor(rX, BFloat16), cute.recast_tensor(rY, BFloat16)
        for k in cutlass.range_constexpr(self.config.lane_vecs):
            x[None, k].store(x[None, k].load() + y[None, k].load())

    @cute.jit
    def normalise(self, rV: cute.Tensor, operands: Operands, site: Site, lane: Int32):
        """The rest of the chain, into ``padded_output`` and the cache."""
        cfg = self.config
        den, inverse = row_divisor(self.row_sum_of_squares(rV))
        gamma = cute.recast_tensor(self.load_row(operands.mGamma, Int32(0), lane), BFloat16)
        value = cute.recast_tensor(rV, BFloat16)
        scale = Float32(cfg.channels**0.5)
        for k in cutlass.range_constexpr(cfg.lane_vecs):
            normalised = divide(widen(value[None, k].load()), den, inverse).to(BFloat16)
            affine = (widen(normalised) * scale).to(BFloat16) * gamma[None, k].load()
            value[None, k].store(silu_of_bf16(widen(affine)).to(BFloat16))
        self.store(rV, operands.mY, site.padded_row, lane, site.is_current)
        self.store(rV, operands.mCache, site.cache_row, lane, site.is_current & site.is_cached)

    @cute.jit
    def row_sum_of_squares(self, rV: cute.Tensor) -> Float32:
        """Over all lanes of the site; even and odd channels apart, for shorter chains."""
        cfg = self.config
        value = cute.recast_tensor(rV, BFloat16)
        even, odd = Float32(0.0), Float32(0.0)
        for k in cutlass.range_constexpr(cfg.lane_vecs):
            wide = widen(value[None, k].load())
            for i in cutlass.range_constexpr(0, VEC, 2):
                even = cute.math.fma(wide[i], wide[i], even)
                odd = cute.math.fma(wide[i + 1], wide[i + 1], odd)
        total = even + odd
        distance = 1
        while const_expr(distance < cfg.lanes):
            total += cute.arch.shuffle_sync_bfly(total, distance)
            distance *= 2
        return total

    # One lane's vectors of a row of C channels, moved as pairs; offsets have 64 bits.

    def make_registers(self) -> cute.Tensor:
        """(PAIR, K)."""
        return cute.make_rmem_tensor((PAIRS, self.config.lane_vecs), Int32)

    @cute.jit
    def load_row(
        self, mX: cute.Tensor, row: Int32, lane: Int32, is_stream: cutlass.Constexpr[bool] = False
    ) -> cute.Tensor:
        """(PAIR, K) of a row; zero beyond the channels."""
        rX = self.make_registers()
        if const_expr(self.config.has_tail):
            rX.fill(0)
        self.load(mX, row, lane, rX, is_stream)
        return rX

    @cute.jit
    def load(
        self,
        mX: cute.Tensor,
        row: Int32,
        lane: Int32,
        rX: cute.Tensor,
        is_stream: cutlass.Constexpr[bool],
    ):
        """What is read once does not displace the channel vectors in L1."""
        gX = self.lane_view(mX, row, lane)
        priority = CacheEvictionPriority.EVICT_NORMAL
        if const_expr(is_stream):
            priority = CacheEvictionPriority.NO_ALLOCATE
        for k in cutlass.range_constexpr(self.config.lane_vecs):
            if self.has_channels(lane, k):
                cute.autovec_copy(gX[None, k], rX[None, k], l1c_evict_priority=priority)

    @cute.jit
    def store(self, rX: cute.Tensor, mX: cute.Tensor, row: Int32, lane: Int32, is_stored: Boolean):
        gX = self.lane_view(mX, row, lane)
        for k in cutlass.range_constexpr(self.config.lane_vecs):
            if is_stored & self.has_channels(lane, k):
                cute.autovec_copy(rX[None, k], gX[None, k])

    @cute.jit
    def lane_view(self, mX: cute.Tensor, row: Int32, lane: Int32) -> cute.Tensor:
        """(PAIR, K)."""
        cfg = self.config
        offset = cute.assume(Int64(row) * cfg.channels + Int64(lane * VEC), divby=VEC)
        layout = cute.make_layout((PAIRS, cfg.lane_vecs), stride=(1, PAIRS * cfg.lanes))
        return cute.make_tensor(cute.recast_ptr(mX.iterator + offset, dtype=Int32), layout)

    def has_channels(self, lane: Int32, k: int) -> Boolean:
        """Whether this lane's k-th vector lies within the channels."""
        cfg = self.config
        if (k + 1) * cfg.lanes * VEC <= cfg.channels:
            return Boolean(True)
        return (k * cfg.lanes + lane) * VEC < cfg.channels


def fake_operands(config: RmsNormSiluPadConfig) -> tuple:
    """Fake tensors in ``__call__`` order, without the stream; N, T, H, W and P are dynamic."""
    n, t, h, w, c = *(cute.sym_int() for _ in range(4)), config.channels

    def rows(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(BFloat16, shape, stride_order=order, assumed_align=16)

    activation, channels = rows(n, t, h, w, c), rows(c)
    return (
        activation,
        channels,
        rows(n, cute.sym_int(), cute.sym_int(), cute.sym_int(), c),
        rows(n, cute.sym_int(), h, w, c),
        channels if config.has_input_bias else None,
        rows(n, cute.sym_int(), h, w, c) if config.has_previous else None,
        activation if config.has_residual else None,
        channels if config.has_residual_bias else None,
        activation if config.has_residual_output else None,
    )
