# SPDX-License-Identifier: Apache-2.0
"""Depthwise causal conv1d decode update, one token per row (sm_80 and newer).

    history         = concat(conv_state[s, d, :], x[n, d])      s = n or conv_state_indices[n]
    conv_state[s,d] = history[-L:]                              bit copies, NaN payloads kept
    acc             = sum_j history[-W + j] * weight[d, j]      FP32 FMA, j ascending, + bias[d]
    out[n, d]       = B(act(acc))                               B: the only rounding to bf16 / fp16

Grid:          x only, channel tile fastest; a CTA owns ``rows`` rows x ``threads * vec`` channels.
Thread:        ``vec`` channels of every row of its CTA. All loads are issued before the first use;
               the filter is read once for all rows.
State:         where a thread's channels are 16 bytes of state they go to registers directly. Three
               tokens never are: there each warp moves its slice of a row in 16-byte vectors
               through a piece of shared memory of its own, cp.async in and stores out.
Bad slots:     a slot below -1, at or above S, or owned by another row is found by the row's CTAs,
               whose threads split a scan of all indices. ``trap`` ends the grid from the CTAs of
               channel tile 0, nothing out of range touched. ``report`` skips the row, so each of
               its CTAs scans and meets at a barrier. Meanwhile the row's data comes into L2 or
               shared memory; held in registers it would halve the occupancy.
Shared memory: 24 bytes per thread and row where the state is staged; to report, one word per warp.
Overlap:       with PDL the next grid may start at once. The first wave of CTAs with few rows
               prefetches into L2, before the wait, what needs no load to be addressed; everything,
               weights included, is read after it.
Requires:      data 16-byte aligned, indices and status 4; x row pitch D or a multiple of 8.
Source:        written for this project; behaviour after the decode update of cudnn-frontend 1.32.0.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu.cpasync import CopyG2SOp
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from cudnn_blocks.geometry.causal_conv1d import (
    BELOW_PADDING,
    DUPLICATE,
    NO_FAULT,
    OUT_OF_RANGE,
    PADDING_SLOT,
)
from cudnn_blocks.stages.conv1d.portable_config import (
    ELEMENT_BYTES,
    SCAN_LOADS,
    VECTOR_ELEMENTS,
    WARP_THREADS,
    CausalConv1dUpdateConfig,
)
from cudnn_blocks.stages.device.activation import silu
from cudnn_blocks.stages.device.control import cta_or, trap
from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.device.prefetch import prefetch_l2, prefetch_l2_line


class CausalConv1dUpdateKernel:
    """One decode step of a depthwise causal convolution; see the module docstring."""

    def __init__(self, config: CausalConv1dUpdateConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        conv_state: cute.Tensor,
        weight: cute.Tensor,
        out: cute.Tensor,
        bias: cute.Tensor | None,
        conv_state_indices: cute.Tensor | None,
        status: cute.Tensor | None,
        stream,
    ):
        cfg = self.config
        operands = (x, conv_state, weight, out, bias, conv_state_indices, status)
        if const_expr(cfg.rows_large == cfg.rows_small):
            self.launch(*operands, cfg.rows_small, stream)
        elif x.shape[0] >= cfg.large_batch_rows:
            self.launch(*operands, cfg.rows_large, stream)
        else:
            self.launch(*operands, cfg.rows_small, stream)

    @cute.jit
    def launch(
        self,
        mX: cute.Tensor,
        mS: cute.Tensor,
        mW: cute.Tensor,
        mO: cute.Tensor,
        mB: cute.Tensor | None,
        mIdx: cute.Tensor | None,
        mStatus: cute.Tensor | None,
        rows: cutlass.Constexpr[int],
        stream,
    ):
        cfg = self.config
        num_row_tiles = (mX.shape[0] - 1) // rows + 1
        self.kernel(mX, mS, mW, mO, mB, mIdx, mStatus, rows).launch(
            grid=(num_row_tiles * cfg.num_channel_tiles, 1, 1),
            block=(cfg.threads, 1, 1),
            stream=stream,
            use_pdl=cfg.use_pdl,
            min_blocks_per_mp=cfg.min_ctas,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mS: cute.Tensor,
        mW: cute.Tensor,
        mO: cute.Tensor,
        mB: cute.Tensor | None,
        mIdx: cute.Tensor | None,
        mStatus: cute.Tensor | None,
        rows: cutlass.Constexpr[int],
    ):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        tile_n, tile_d = bidx // cfg.num_channel_tiles, bidx % cfg.num_channel_tiles
        n0 = tile_n * rows
        d0 = tile_d * (cfg.threads * cfg.vec)
        d = d0 + tidx * cfg.vec
        has_channels = Boolean(True) if const_expr(not cfg.has_channel_tail) else d < cfg.channels

        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            if const_expr(cfg.use_prefetch and rows == cfg.rows_small):
                if (tidx == 0) & (bidx < cfg.first_wave_ctas):
                    self.prefetch_tile(mX, mS, mW, n0, d0, rows)
            cute.arch.griddepcontrol_wait()

        smem = SmemAllocator()
        if const_expr(cfg.stages_state):
            sS = smem.allocate_tensor(
                mS.element_type,
                cute.make_layout((cfg.warp_channels * cfg.state_len, rows, cfg.num_warps)),
                byte_alignment=16,
            )
            sWarp = sS[None, None, tidx // WARP_THREADS]
            warp_d = d0 + tidx // WARP_THREADS * cfg.warp_channels
            lane = tidx % WARP_THREADS
        if const_expr(cfg.has_indices):
            sBits = None
            if const_expr(cfg.bad_index == "report"):
                sBits = smem.allocate_tensor(
                    Uint32, cute.make_layout(cfg.num_warps), byte_alignment=16
                )
            rScan = cute.make_rmem_tensor(SCAN_LOADS, Int32)
            if self.checks_tile(tile_d):
                self.load_others(mIdx, rScan, tidx, n0, rows)

        # Equal in every thread of the CTA. Row numbers are 64 bit so that offsets of rows fold.
        rows_left = mX.shape[0] - n0
        ns = [Int64(n0) + r for r in range(rows)]
        slots, live = ns, [r < rows_left for r in range(rows)]
        if const_expr(cfg.has_indices):
            slots = [self.load_slot(mIdx, n0 + r) for r in range(rows)]
            faults = [self.slot_fault(mS, slots[r]) for r in range(rows)]
            live = [(slots[r] != PADDING_SLOT) & (faults[r] == NO_FAULT) for r in range(rows)]
            # The check hides the loads, which are under way without holding registers.
            for r in cutlass.range_constexpr(rows):
                if const_expr(cfg.stages_state):
                    if live[r]:
                        self.fetch_state(mS, sWarp[None, r], slots[r], warp_d, lane)
                if live[r] & has_channels:
                    if const_expr(not cfg.stages_state):
                        prefetch_l2_line(self.state_view(mS, slots[r], d).iterator)
                    prefetch_l2_line(self.row_view(mX, ns[r], d).iterator)
            faults = self.check_slots(mIdx, mStatus, rScan, sBits, slots, faults, n0, tile_d, tidx)
            live = [live[r] & (faults[r] == NO_FAULT) for r in range(rows)]

        rS = [cute.make_rmem_tensor(self.register_layout(), mS.element_type) for _ in range(rows)]
        rX = [cute.make_rmem_tensor(cfg.vec, mX.element_type) for _ in range(rows)]
        rW = cute.make_rmem_tensor(
            cute.make_layout((cfg.vec, cfg.width), stride=(cfg.width, 1)), mW.element_type
        )
        rB = cute.make_rmem_tensor(cfg.vec, mW.element_type)
        for r in cutlass.range_constexpr(rows):
            if const_expr(cfg.stages_state and not cfg.has_indices):
                if live[r]:
                    self.fetch_state(mS, sWarp[None, r], slots[r], warp_d, lane)
            if live[r] & has_channels:
                if const_expr(not cfg.stages_state):
                    cute.autovec_copy(self.state_view(mS, slots[r], d), rS[r])
                cute.autovec_copy(self.row_view(mX, ns[r], d), rX[r])
        if has_channels:
            cute.autovec_copy(self.weight_view(mW, d), rW)
            if const_expr(cfg.has_bias):
                cute.autovec_copy(self.channel_view(mB, d), rB)
        if const_expr(cfg.stages_state):
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            for r in cutlass.range_constexpr(rows):
                cute.autovec_copy(self.staged_view(sWarp[None, r], lane), rS[r])

        rAcc = self.convolve(rS, rX, rW, rB)
        for r in cutlass.range_constexpr(rows):
            self.shift(rS[r], rX[r])
            if const_expr(cfg.stages_state):
                cute.autovec_copy(rS[r], self.staged_view(sWarp[None, r], lane))
            elif live[r] & has_channels:
                cute.autovec_copy(rS[r], self.state_view(mS, slots[r], d))
        if const_expr(cfg.stages_state):
            cute.arch.sync_warp()
        for r in cutlass.range_constexpr(rows):
            if const_expr(cfg.stages_state):
                if live[r]:
                    self.store_state(sWarp[None, r], mS, slots[r], warp_d, lane)
            if (r < rows_left) & has_channels:
                cute.autovec_copy(
                    self.round(rAcc[r], live[r], mO.element_type), self.row_view(mO, ns[r], d)
                )

    # Views of one thread's channels: 64-bit offsets, with the divisibility that D gives them.

    def register_layout(self) -> cute.Layout:
        """(vec, L) in the order of memory."""
        cfg = self.config
        stride = (1, cfg.vec) if cfg.state_layout == "channel_last" else (cfg.state_len, 1)
        return cute.make_layout((cfg.vec, cfg.state_len), stride=stride)

    @cute.jit
    def state_view(self, mS: cute.Tensor, slot: Int32 | Int64, d: Int32) -> cute.Tensor:
        cfg = self.config
        stride_s, stride_d, stride_l = cfg.state_strides
        offset = cute.assume(Int64(slot) * stride_s + Int64(d) * stride_d, divby=cfg.vec * stride_d)
        layout = cute.make_layout((cfg.vec, cfg.state_len), stride=(stride_d, stride_l))
        return cute.make_tensor(mS.iterator + offset, layout)

    @cute.jit
    def staged_view(self, sRow: cute.Tensor, lane: Int32) -> cute.Tensor:
        """A thread's (vec, L) in its warp's slice of a row, ordered as global memory is."""
        cfg = self.config
        is_last = cfg.state_layout == "channel_last"
        stride_d, stride_l = (1, cfg.warp_channels) if is_last else (cfg.state_len, 1)
        offset = cute.assume(lane * (cfg.vec * stride_d), divby=cfg.vec * stride_d)
        layout = cute.make_layout((cfg.vec, cfg.state_len), stride=(stride_d, stride_l))
        return cute.make_tensor(sRow.iterator + offset, layout)

    @cute.jit
    def vector_views(self, mS, sRow, slot: Int32 | Int64, warp_d: Int32, vector: Int32) -> tuple:
        """One 16-byte vector in global and shared memory, and whether D reaches that far."""
        cfg = self.config
        element = vector * VECTOR_ELEMENTS
        if const_expr(cfg.state_layout == "channel_last"):
            token, channel = element // cfg.warp_channels, warp_d + element % cfg.warp_channels
            in_slot, is_inside = token * cfg.channels + channel, channel < cfg.channels
        else:
            in_slot = warp_d * cfg.state_len + element
            is_inside = in_slot < cfg.channels * cfg.state_len
        offset = cute.assume(Int64(slot) * cfg.state_strides[0] + in_slot, divby=VECTOR_ELEMENTS)
        layout = cute.make_layout(VECTOR_ELEMENTS)
        sVector = sRow.iterator + cute.assume(element, divby=VECTOR_ELEMENTS)
        return (
            cute.make_tensor(mS.iterator + offset, layout),
            cute.make_tensor(sVector, layout),
            is_inside & (vector < cfg.warp_vectors),
        )

    @cute.jit
    def fetch_state(self, mS, sRow, slot: Int32 | Int64, warp_d: Int32, lane: Int32):
        """Starts the warp's slice of a slot on its way into shared memory."""
        atom = cute.make_copy_atom(CopyG2SOp(), mS.element_type, num_bits_per_copy=128)
        for j in cutlass.range_constexpr(-(-self.config.warp_vectors // WARP_THREADS)):
            vector = lane + j * WARP_THREADS
            gVector, sVector, is_inside = self.vector_views(mS, sRow, slot, warp_d, vector)
            if is_inside:
                cute.copy(atom, gVector, sVector)

    @cute.jit
    def store_state(self, sRow, mS, slot: Int32 | Int64, warp_d: Int32, lane: Int32):
        """Writes the warp's slice back."""
        for j in cutlass.range_constexpr(-(-self.config.warp_vectors // WARP_THREADS)):
            vector = lane + j * WARP_THREADS
            gVector, sVector, is_inside = self.vector_views(mS, sRow, slot, warp_d, vector)
            if is_inside:
                rVector = cute.make_rmem_tensor(VECTOR_ELEMENTS, mS.element_type)
                cute.autovec_copy(sVector, rVector)
                cute.autovec_copy(rVector, gVector)

    @cute.jit
    def row_view(self, mX: cute.Tensor, n: Int64, d: Int32) -> cute.Tensor:
        vec = self.config.vec
        offset = cute.assume(n * mX.stride[0] + Int64(d), divby=vec)
        return cute.make_tensor(mX.iterator + offset, cute.make_layout(vec))

    @cute.jit
    def weight_view(self, mW: cute.Tensor, d: Int32) -> cute.Tensor:
        cfg = self.config
        offset = cute.assume(Int64(d) * cfg.width, divby=cfg.vec * cfg.width)
        return cute.make_tensor(
            mW.iterator + offset, cute.make_layout((cfg.vec, cfg.width), stride=(cfg.width, 1))
        )

    @cute.jit
    def channel_view(self, mB: cute.Tensor, d: Int32) -> cute.Tensor:
        vec = self.config.vec
        return cute.make_tensor(
            mB.iterator + cute.assume(Int64(d), divby=vec), cute.make_layout(vec)
        )

    @cute.jit
    def prefetch_tile(self, mX, mS, mW, n0, d0, rows: cutlass.Constexpr[int]):
        """Asks L2 for this CTA's slices of x, state and weight; one thread, uniform addresses."""
        cfg = self.config
        num_channels = Int32(cfg.threads * cfg.vec)
        if const_expr(cfg.has_channel_tail):
            num_channels = cutlass.min(num_channels, cfg.channels - d0)
        slice_bytes = num_channels * ELEMENT_BYTES
        for r in cutlass.range_constexpr(rows):
            if n0 + r < mX.shape[0]:
                prefetch_l2(self.row_view(mX, Int64(n0) + r, d0).iterator, slice_bytes)
                gS = self.state_view(mS, Int64(n0) + r, d0)
                if const_expr(cfg.state_layout == "channel_last"):
                    for l in cutlass.range_constexpr(cfg.state_len):
                        prefetch_l2(gS[None, l].iterator, slice_bytes)
                else:
                    prefetch_l2(gS.iterator, slice_bytes * cfg.state_len)
        if n0 == 0:
            prefetch_l2(self.weight_view(mW, d0).iterator, slice_bytes * cfg.width)

    # Arithmetic on registers.

    @cute.jit
    def convolve(self, rS, rX, rW, rB):
        """act(conv) of every row in FP32; channel outermost, to keep few filter taps live."""
        cfg = self.config
        rows, first = len(rS), cfg.state_len + 1 - cfg.width
        rAcc = [cute.make_rmem_tensor(cfg.vec, Float32) for _ in range(rows)]
        for v in cutlass.range_constexpr(cfg.vec):
            w = [rW[v, j].to(Float32) for j in range(cfg.width)]
            for r in cutlass.range_constexpr(rows):
                taps = [rS[r][v, l].to(Float32) for l in range(first, cfg.state_len)] + [
                    rX[r][v].to(Float32)
                ]
                acc = taps[0] * w[0]
                for j in cutlass.range_constexpr(1, cfg.width):
                    acc = cute.math.fma(taps[j], w[j], acc)
                if const_expr(cfg.has_bias):
                    acc += rB[v].to(Float32)
                if const_expr(cfg.activation == "silu"):
                    acc = silu(acc)
                rAcc[r][v] = acc
        return rAcc

    @cute.jit
    def round(self, rAcc: cute.Tensor, live: Boolean, dtype: cutlass.Constexpr) -> cute.Tensor:
        """B(rAcc), zero where the row is padding or at fault."""
        rO = cute.make_rmem_tensor(rAcc.layout, dtype)
        rO.store(rAcc.load().to(dtype))
        if const_expr(self.config.has_indices):
            if not live:
                rO.fill(dtype(0.0))
        return rO

    @cute.jit
    def shift(self, rS: cute.Tensor, rX: cute.Tensor):
        """Drops the oldest token of the history and appends x; moves bits, computes nothing."""
        cfg = self.config
        for v in cutlass.range_constexpr(cfg.vec):
            for l in cutlass.range_constexpr(cfg.state_len - 1):
                rS[v, l] = rS[v, l + 1]
            rS[v, cfg.state_len - 1] = rX[v]

    # Slots.

    @cute.jit
    def load_slot(self, mIdx: cute.Tensor, n: Int32) -> Int32:
        """The slot of row n; a row past the batch counts as padding."""
        slot = Int32(PADDING_SLOT)
        if n < mIdx.shape[0]:
            slot = mIdx[n]
        return slot

    @cute.jit
    def slot_fault(self, mS: cute.Tensor, slot: Int32) -> Int32:
        fault = Int32(OUT_OF_RANGE) if slot >= mS.shape[0] else Int32(NO_FAULT)
        return Int32(BELOW_PADDING) if slot < PADDING_SLOT else fault

    def checks_tile(self, tile_d: Int32) -> Boolean:
        """Every CTA needs the verdict to report; one channel tile suffices to trap."""
        return Boolean(True) if self.config.bad_index == "report" else tile_d == 0

    @cute.jit
    def check_slots(self, mIdx, mStatus, rScan, sBits, slots, faults, n0, tile_d, tidx):
        """Adds duplicates to ``faults``, then traps, or records the faulty rows in ``status``."""
        rows = len(slots)
        if const_expr(self.config.bad_index == "trap"):
            if tile_d == 0:
                is_bad = self.find_duplicates(mIdx, rScan, slots, n0, tidx) != 0
                for r in cutlass.range_constexpr(rows):
                    is_bad |= faults[r] != NO_FAULT
                if is_bad:
                    trap()
        else:
            duplicates = cta_or(self.find_duplicates(mIdx, rScan, slots, n0, tidx), sBits)
            for r in cutlass.range_constexpr(rows):
                if (faults[r] == NO_FAULT) & (duplicates & (1 << r) != 0):
                    faults[r] = Int32(DUPLICATE)
                if (faults[r] != NO_FAULT) & (tile_d == 0) & (tidx == 0):
                    mStatus[n0 + r, 0] = faults[r]
                    mStatus[n0 + r, 1] = slots[r]
        return faults

    @cute.jit
    def load_others(self, mIdx, rScan, first: Int32, n0: Int32, rows: cutlass.Constexpr[int]):
        """This thread's share of the slots from row ``first`` on; padding for the tile's own."""
        for j in cutlass.range_constexpr(SCAN_LOADS):
            n = Uint32(first) + j * self.config.threads
            rScan[j] = Int32(PADDING_SLOT)
            if (n < Uint32(mIdx.shape[0])) & (n - Uint32(n0) >= rows):
                rScan[j] = mIdx[n]

    @cute.jit
    def find_duplicates(self, mIdx, rScan, slots, n0, tidx) -> Uint32:
        """Bit r: this thread saw row r's slot in another row; the CTA splits the N indices."""
        rows = len(slots)
        bits = Uint32(0)
        for r in cutlass.range_constexpr(rows):
            for q in cutlass.range_constexpr(r):
                bits = bits | ((1 << r) | (1 << q)) if slots[q] == slots[r] else bits
        bits |= self.match(rScan, slots)
        chunk_rows = self.config.threads * SCAN_LOADS
        num_chunks = (mIdx.shape[0] - 1) // chunk_rows + 1
        for chunk in cutlass.range(1, num_chunks):
            rMore = cute.make_rmem_tensor(SCAN_LOADS, Int32)
            self.load_others(mIdx, rMore, tidx + chunk * chunk_rows, n0, rows)
            bits |= self.match(rMore, slots)
        for r in cutlass.range_constexpr(rows):
            bits = bits if slots[r] != PADDING_SLOT else bits & ~(1 << r)
        return bits

    @cute.jit
    def match(self, rScan, slots) -> Uint32:
        """Bit r: row r's slot is among ``rScan``."""
        bits = Uint32(0)
        for r in cutlass.range_constexpr(len(slots)):
            is_seen = Boolean(False)
            for j in cutlass.range_constexpr(SCAN_LOADS):
                is_seen |= rScan[j] == slots[r]
            bits = bits | (1 << r) if is_seen else bits
        return bits


def fake_operands(config: CausalConv1dUpdateConfig) -> tuple:
    """Fake tensors in ``__call__`` order, no stream; N, S and the row pitch are dynamic."""
    dtype, d = DTYPES[config.dtype], config.channels
    n, s = cute.sym_int(), cute.sym_int()
    ld = cute.sym_int64(divisibility=math.gcd(8, d))

    def data(shape, stride):
        return make_fake_tensor(dtype, shape, stride, assumed_align=16)

    def ints(shape, stride):
        return make_fake_tensor(Int32, shape, stride, assumed_align=4)

    return (
        data((n, d), (ld, 1)),
        data((s, d, config.state_len), config.state_strides),
        data((d, config.width), (config.width, 1)),
        data((n, d), (d, 1)),
        data((d,), (1,)) if config.has_bias else None,
        ints((n,), (1,)) if config.has_indices else None,
        ints((n, 2), (2, 1)) if config.has_indices and config.bad_index == "report" else None,
    )
