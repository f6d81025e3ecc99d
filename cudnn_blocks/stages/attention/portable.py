# SPDX-License-Identifier: Apache-2.0
"""Scaled dot product attention with an optional sigmoid gate (sm_80 and newer).

    s   = q . k                              FP32 accumulation
    p   = 2 ** (s * c - r)                   c = scale * log2(e); FP32; 0 where the key is hidden
    o   = B(sum_j B(p_j) v_j / sum_j p_j)    FP32 accumulation and row sum; B: rounding to the dtype
    lse = r * ln(2) + ln(sum_j p_j)
    o   = B(o * sigmoid(gate))               with a gate

Visible keys:  row i sees key j iff j < L, j <= i + offset + window_right (causal) and
               j >= i + offset - window_left (window). L is seq_lens[b] cut to [0, Sk], or Sk;
               offset is 0, or L - S with causal_bottom_right. A row that sees none is 0, its lse
               -inf, by select. Rows of K and V from L on are never read. A value before L that is
               not finite reaches all rows of a warp in whose steps it lies, as 0 times it is NaN.
Reference r:   a maximum of s * c of the keys met so far. It moves only where it would grow by more
               than 8, as what it scales is a ratio; 2 ** 8 is far from the limits of FP16.
Grid:          x only, one CTA per tile of query rows, query head and batch entry: heads fastest, so
               that neighbours share keys; then tiles, the longest of a causal mask first.
Warps:         4 or 8, 16 or 32 query rows each and all keys of a step. mma.sync m16n8k16; the
               probabilities become the next product's operand in registers.
Pipeline:      cp.async groups, keys from last to first. Two stages: both operands of the next step
               are on their way during a step, one barrier a step. One stage: V is copied under QK^T
               and the next K under the softmax and PV, two barriers a step.
Shared memory: rows of d_head elements, whose 16-byte columns are XOR-ed with the row's number
               modulo 8. The finished rows of a warp take the place of its queries.
Overlap:       with PDL the next grid may start at once; all memory is touched after the wait.
Requires:      strides multiples of 8, the last one 1; data 16-byte aligned; S, Sk <= 2**28.
Source:        written for this project; the algorithm of FlashAttention-2, no code taken.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor
from cutlass.memory import SmemAllocator

from cudnn_blocks.stages.attention.portable_config import (
    MMA_K,
    MMA_M,
    MMA_N,
    VEC,
    WARP_THREADS,
    SdpaPortableConfig,
    smem_bytes,
)
from cudnn_blocks.stages.device.cp_async import cp_async_16_or_zero
from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.device.masked_store import store_16_if
from cudnn_blocks.stages.device.sigmoid import gated

__all__ = ["SdpaPortableConfig", "SdpaPortableKernel", "fake_operands", "smem_bytes"]

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
NEG_INF = -math.inf
ROWS = 2  # rows of an m16 block that one lane holds, 8 apart
PAIR = 2  # consecutive columns of an n8 tile that one lane holds
QUAD = 4  # lanes that share a row


class Tile(NamedTuple):
    """Where a CTA works."""

    b: Int32
    h: Int32
    m0: Int32
    """First query row."""
    num_rows: Int32
    """S."""
    num_keys: Int32
    """L."""
    offset: Int32
    """Key of the diagonal in row 0."""


class Scales(NamedTuple):
    """Run-time factors."""

    scores: Float32
    """To base 2."""
    value: Float32 | None = None
    """Of codes: what V is descaled by."""
    codes: Float32 | None = None
    """What the result is scaled by before it becomes codes."""


class RowState(NamedTuple):
    """Per row of a lane: the reference, and this lane's part of the row sum: (ROW, BLOCK)."""

    rRef: cute.Tensor
    rSum: cute.Tensor


class SdpaPortableKernel:
    """One launch of attention; see the module docstring."""

    def __init__(self, config: SdpaPortableConfig):
        self.config = config
        self.dtype = DTYPES[config.act_dtype]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        gate: cute.Tensor | None,
        lse: cute.Tensor | None,
        seq_lens: cute.Tensor | None,
        scale: Float32,
        stream,
    ):
        num_tiles = self.num_tiles(q)
        self.kernel(q, k, v, o, gate, lse, seq_lens, scale * LOG2_E, num_tiles).launch(
            **self.launch_facts(q, num_tiles), stream=stream
        )

    def num_tiles(self, q: cute.Tensor) -> Int32:
        """Tiles of a head of one batch entry."""
        return (q.shape[1] - 1) // self.config.tile.m + 1

    def launch_facts(self, q: cute.Tensor, num_tiles: Int32) -> dict:
        """Grid and attributes of the launch."""
        cfg = self.config
        return {
            "grid": (num_tiles * cfg.h_q * q.shape[0], 1, 1),
            "block": (cfg.threads, 1, 1),
            "min_blocks_per_mp": 1,  # or ptxas spills to make room for more CTAs
            "use_pdl": cfg.use_pdl,
        }

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mGate: cute.Tensor | None,
        mLse: cute.Tensor | None,
        mLens: cute.Tensor | None,
        scale_log2: Float32,
        num_tiles: Int32,
    ):
        self.run(mQ, mK, mV, mO, mGate, mLse, mLens, Scales(scale_log2), num_tiles)

    @cute.jit
    def run(self, mQ, mK, mV, mO, mGate, mLse, mLens, scales, num_tiles):
        """The kernel, whatever it is launched with."""
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        tile = self.locate(mQ, mK, mLens, bidx, num_tiles)

        smem = SmemAllocator()
        sQ, sK, sV = (
            smem.allocate_tensor(self.dtype, cute.make_layout(size), byte_alignment=128)
            for size in (
                cfg.q_elements,
                cfg.tile.num_stages * cfg.kv_stage,
                cfg.tile.num_stages * cfg.kv_stage,
            )
        )
        state = RowState(self.row_registers(), self.row_registers())
        tOrO = self.accumulate(mQ, mK, mV, sQ, sK, sV, state, tile, scales.scores, tidx)
        self.finish(tOrO, state, sQ, mO, mGate, mLse, tile, scales)

    @cute.jit
    def locate(self, mQ, mK, mLens, bidx, num_tiles) -> Tile:
        cfg = self.config
        column = bidx // cfg.h_q
        b, m = column // num_tiles, column % num_tiles
        if const_expr(cfg.is_causal):
            m = num_tiles - 1 - m
        num_keys = mK.shape[1]
        if const_expr(cfg.has_seq_lens):
            num_keys = cutlass.min(cutlass.max(mLens[b], 0), num_keys)
        offset = Int32(0)
        if const_expr(cfg.causal_bottom_right):
            offset = num_keys - mQ.shape[1]
        return Tile(b, bidx % cfg.h_q, m * cfg.tile.m, mQ.shape[1], num_keys, offset)

    # Visible keys.

    def first_key(self, tile: Tile, row: Int32) -> Int32:
        """First key that a row may see."""
        if not self.config.has_window_left:
            return Int32(0)
        return cutlass.max(row + tile.offset - self.config.window_left, 0)

    def end_key(self, tile: Tile, row: Int32) -> Int32:
        """Key after the last that a row may see; at most ``first_key`` where it sees none."""
        if not self.config.is_causal:
            return tile.num_keys
        return cutlass.min(row + tile.offset + (self.config.window_right + 1), tile.num_keys)

    # Accumulation.

    @cute.jit
    def accumulate(self, mQ, mK, mV, sQ, sK, sV, state, tile, scale_log2, tidx) -> cute.Tensor:
        """Unnormalised output of this warp's rows, ((column of a pair, row), block, n8)."""
        cfg = self.config
        n, num_stages = cfg.tile.n, cfg.tile.num_stages
        kv_head = tile.h // cfg.gqa_ratio
        vec = tidx % cfg.row_vecs
        gK = self.head_pointer(mK, tile.b, kv_head, vec)
        gV = self.head_pointer(mV, tile.b, kv_head, vec)
        last_row = cutlass.min(tile.m0 + cfg.tile.m, tile.num_rows) - 1
        begin = self.first_key(tile, tile.m0) // n
        last = (self.end_key(tile, last_row) - 1) // n
        num_steps = last - begin + 1
        # A step in whose keys no row has to be masked lies between these two keys.
        full_begin = self.first_key(tile, last_row)
        full_end = self.end_key(tile, tile.m0)

        gQ = self.head_pointer(mQ, tile.b, tile.h, vec)
        self.copy_rows(mQ, gQ, sQ, 0, tile.m0, tile.num_rows, cfg.tile.m, tidx)
        first_key = cutlass.max(last, 0) * n
        self.copy_rows(mK, gK, sK, 0, first_key, tile.num_keys, n, tidx)
        if const_expr(num_stages == 2):
            self.copy_rows(mV, gV, sV, 0, first_key, tile.num_keys, n, tidx)
        cute.arch.cp_async_commit_group()

        mma_atom = cute.make_mma_atom(warp.MmaF16BF16Op(self.dtype, Float32, (MMA_M, MMA_N, MMA_K)))
        tOrO = self.accumulator(cfg.d_head)
        tOrO.fill(0.0)
        state.rRef.fill(NEG_INF)
        state.rSum.fill(0.0)
        for step in cutlass.range(num_steps, unroll=1):
            key0 = (last - step) * n
            stage = Int32(0) if const_expr(num_stages == 1) else step % num_stages
            next_stage = Int32(0) if const_expr(num_stages == 1) else 1 - stage
            has_next = step + 1 < num_steps
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if const_expr(num_stages == 1):
                self.copy_rows(mV, gV, sV, 0, key0, tile.num_keys, n, tidx)
            elif has_next:
                self.copy_rows(mK, gK, sK, next_stage, key0 - n, tile.num_keys, n, tidx)
                self.copy_rows(mV, gV, sV, next_stage, key0 - n, tile.num_keys, n, tidx)
            cute.arch.cp_async_commit_group()

            tSrS = self.scores(mma_atom, sQ, sK, stage)
            is_partial = (key0 < full_begin) | (key0 + n > full_end)
            for _ in cutlass.range(once_if(is_partial), unroll=1):
                self.mask(tSrS, tile, key0)
            if const_expr(num_stages == 1):
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_threads()
                if has_next:
                    self.copy_rows(mK, gK, sK, 0, key0 - n, tile.num_keys, n, tidx)
                cute.arch.cp_async_commit_group()
            self.softmax(tSrS, tOrO, state, scale_log2)
            self.weigh(mma_atom, tOrO, tSrS, sV, stage)
        # Without a step, nobody has waited yet for the queries, whose place the results take.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        return tOrO

    @cute.jit
    def scores(self, mma_atom, sQ, sK, stage) -> cute.Tensor:
        """QK^T of this warp's rows and a step's keys."""
        cfg = self.config
        ldmatrix_atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(num_matrices=4), self.dtype)
        lane = cute.arch.lane_idx()
        tSrQ = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), cfg.warp_blocks)), self.dtype)
        tSrK = cute.make_rmem_tensor(cute.make_layout(((2, 2), cfg.tile.n // MMA_N)), self.dtype)
        rQ = cute.make_tensor(tSrQ.iterator, cute.make_layout((VEC, cfg.warp_blocks)))
        rK = cute.make_tensor(tSrK.iterator, cute.make_layout((VEC, cfg.tile.n // 16)))
        q_row = warp_index() * cfg.warp_rows + lane % 16
        k_row = lane // 16 * 8 + lane % 8
        tSrS = self.accumulator(cfg.tile.n)
        tSrS.fill(0.0)
        for kk in cutlass.range_constexpr(cfg.d_head // MMA_K):
            offset = self.swizzled(q_row, lane // 16, 2 * kk)
            for i in cutlass.range_constexpr(cfg.warp_blocks):
                src = vector_view(sQ, offset + i * MMA_M * cfg.row_width)
                cute.copy(ldmatrix_atom, src, rQ[None, i])
            offset = stage * cfg.kv_stage + self.swizzled(k_row, lane // 8 % 2, 2 * kk)
            for j in cutlass.range_constexpr(cfg.tile.n // 16):
                src = vector_view(sK, offset + j * 16 * cfg.row_width)
                cute.copy(ldmatrix_atom, src, rK[None, j])
            cute.gemm(mma_atom, tSrS, tSrQ, tSrK, tSrS)
        return tSrS

    @cute.jit
    def mask(self, tSrS, tile: Tile, key0):
        """-inf where the row does not see the key."""
        cfg = self.config
        first = key0 + cute.arch.lane_idx() % QUAD * PAIR
        for i in cutlass.range_constexpr(cfg.warp_blocks):
            for r in cutlass.range_constexpr(ROWS):
                row = self.lane_row(tile, i, r)
                end = self.end_key(tile, row) - first
                begin = self.first_key(tile, row) - first
                for j in cutlass.range_constexpr(cfg.tile.n // MMA_N):
                    for e in cutlass.range_constexpr(PAIR):
                        column = j * MMA_N + e
                        is_hidden = column >= end
                        if const_expr(cfg.has_window_left):
                            is_hidden |= column < begin
                        s = tSrS[(e, r), i, j]
                        tSrS[(e, r), i, j] = Float32(NEG_INF) if is_hidden else s

    @cute.jit
    def softmax(self, tSrS, tOrO, state: RowState, scale_log2):
        """Scores to probabilities in place; output and row sums follow the reference."""
        cfg = self.config
        rFactor = self.row_registers()
        has_grown = Boolean(False)
        for i in cutlass.range_constexpr(cfg.warp_blocks):
            for r in cutlass.range_constexpr(ROWS):
                largest = Float32(NEG_INF)
                for j in cutlass.range_constexpr(cfg.tile.n // MMA_N):
                    for e in cutlass.range_constexpr(PAIR):
                        largest = cute.arch.fmax(largest, tSrS[(e, r), i, j])
                for offset in cutlass.range_constexpr(1, QUAD // 2 + 1):
                    other = cute.arch.shuffle_sync_bfly(largest, offset=offset)
                    largest = cute.arch.fmax(largest, other)
                largest = multiply(largest, scale_log2)
                ref = state.rRef[r, i]
                grows = largest - ref > cfg.max_growth  # false for -inf less -inf
                new_ref = largest if grows else ref
                rFactor[r, i] = exp2(ref - new_ref) if grows else Float32(1.0)
                state.rRef[r, i] = new_ref
                has_grown |= grows
        for _ in cutlass.range(once_if(cute.arch.vote_any_sync(has_grown)), unroll=1):
            for i in cutlass.range_constexpr(cfg.warp_blocks):
                for r in cutlass.range_constexpr(ROWS):
                    state.rSum[r, i] = state.rSum[r, i] * rFactor[r, i]
                    for j in cutlass.range_constexpr(cfg.d_head // MMA_N):
                        for e in cutlass.range_constexpr(PAIR):
                            tOrO[(e, r), i, j] = tOrO[(e, r), i, j] * rFactor[r, i]
        for i in cutlass.range_constexpr(cfg.warp_blocks):
            for r in cutlass.range_constexpr(ROWS):
                ref = state.rRef[r, i]
                minus_ref = Float32(0.0) if ref == NEG_INF else -ref  # nothing seen yet: p = 0
                if const_expr(cfg.weight_bits):
                    minus_ref += cfg.weight_bits
                total = state.rSum[r, i]
                for j in cutlass.range_constexpr(cfg.tile.n // MMA_N):
                    for e in cutlass.range_constexpr(PAIR):
                        p = exp2(cute.math.fma(tSrS[(e, r), i, j], scale_log2, minus_ref))
                        tSrS[(e, r), i, j] = p
                        total += p
                state.rSum[r, i] = total

    @cute.jit
    def weigh(self, mma_atom, tOrO, tSrS, sV, stage):
        """Adds PV to the output."""
        cfg = self.config
        ldmatrix_atom = cute.make_copy_atom(
            warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), self.dtype
        )
        lane = cute.arch.lane_idx()
        num_tiles = cfg.tile.n // MMA_N
        rP = cute.make_rmem_tensor(tSrS.layout, self.dtype)
        rP.store(tSrS.load().to(self.dtype))
        v_row = lane % 16
        for kk in cutlass.range_constexpr(cfg.tile.n // MMA_K):
            layout = cute.make_layout(
                ((2, 2, 2), cfg.warp_blocks), stride=((1, 2, 4), 4 * num_tiles)
            )
            tOrP = cute.make_tensor(rP.iterator + kk * 8, layout)
            for j in cutlass.range_constexpr(cfg.d_head // 16):
                tOrV = cute.make_rmem_tensor(cute.make_layout(((2, 2), 2)), self.dtype)
                rV = cute.make_tensor(tOrV.iterator, cute.make_layout(VEC))
                offset = stage * cfg.kv_stage + self.swizzled(v_row, lane // 16, 2 * j)
                cute.copy(ldmatrix_atom, vector_view(sV, offset + kk * MMA_K * cfg.row_width), rV)
                acc = cute.local_tile(tOrO, ((2, 2), cfg.warp_blocks, 2), (0, 0, j))
                cute.gemm(mma_atom, acc, tOrP, tOrV, acc)

    # Epilogue.

    @cute.jit
    def finish(self, tOrO, state: RowState, sQ, mO, mGate, mLse, tile: Tile, scales: Scales):
        """Normalises, rounds, gates and stores this warp's rows."""
        cfg = self.config
        lane = cute.arch.lane_idx()
        first_row = warp_index() * cfg.warp_rows
        for i in cutlass.range_constexpr(cfg.warp_blocks):
            for r in cutlass.range_constexpr(ROWS):
                total = state.rSum[r, i]
                for offset in cutlass.range_constexpr(1, QUAD // 2 + 1):
                    total += cute.arch.shuffle_sync_bfly(total, offset=offset)
                row = self.lane_row(tile, i, r)
                is_dead = self.first_key(tile, row) >= self.end_key(tile, row)
                inverse = cute.math.rcp(total, approx=True, ftz=True)
                if const_expr(cfg.is_fp8):
                    inverse = inverse * scales.value
                local = first_row + i * MMA_M + r * 8 + lane // QUAD
                self.stage_row(tOrO, i, r, inverse, is_dead, sQ, local)
                if const_expr(cfg.has_lse):
                    lse = state.rRef[r, i] + cute.math.log2(total, approx=True)
                    if const_expr(cfg.weight_bits):
                        lse -= cfg.weight_bits
                    lse = lse * LN_2
                    lse = Float32(NEG_INF) if is_dead else lse
                    if (lane % QUAD == 0) & (row < tile.num_rows):
                        mLse[tile.b, tile.h, row] = lse
        cute.arch.sync_warp()
        self.store_rows(sQ, mO, mGate, tile, first_row, scales)

    @cute.jit
    def stage_row(self, tOrO, i, r, inverse, is_dead, sQ, local):
        """A lane's part of a row, rounded, to shared memory; 0 by select in a dead row."""
        cfg = self.config
        lane = cute.arch.lane_idx()
        for j in cutlass.range_constexpr(cfg.d_head // MMA_N):
            rO = cute.make_rmem_tensor(PAIR, Float32)
            for e in cutlass.range_constexpr(PAIR):
                x = tOrO[(e, r), i, j] * inverse
                rO[e] = Float32(0.0) if is_dead else x
            rY = cute.make_rmem_tensor(PAIR, self.dtype)
            rY.store(rO.load().to(self.dtype))
            offset = self.swizzled(local, 0, j, cfg.d_head) + lane % QUAD * PAIR
            cute.autovec_copy(rY, vector_view(sQ, offset, PAIR))

    @cute.jit
    def store_rows(self, sQ, mO, mGate, tile: Tile, first_row, scales: Scales):
        """Rounded rows of this warp from shared to global memory, through the gate."""
        cfg = self.config
        lane = cute.arch.lane_idx()
        pass_rows = WARP_THREADS // cfg.out_vecs
        local = first_row + lane // cfg.out_vecs
        vec = lane % cfg.out_vecs
        num_passes = cfg.warp_rows // pass_rows
        gO = self.head_pointer(mO, tile.b, tile.h, vec)
        layout = cute.make_layout((VEC, num_passes))
        rGate = cute.make_rmem_tensor(layout, self.dtype)
        if const_expr(cfg.has_gate):
            rGate.fill(0.0)
            gGate = self.head_pointer(mGate, tile.b, tile.h, vec)
            for p in cutlass.range_constexpr(num_passes):
                row = tile.m0 + local + p * pass_rows
                if row < tile.num_rows:
                    src = self.row_pointer(mGate, gGate, row)
                    cute.autovec_copy(cute.make_tensor(src, cute.make_layout(VEC)), rGate[None, p])
        for p in cutlass.range_constexpr(num_passes):
            row = tile.m0 + local + p * pass_rows
            offset = self.swizzled(local + p * pass_rows, vec, 0, cfg.d_head)
            x = vector_view(sQ, offset).load()
            if const_expr(cfg.has_gate):
                x = gated(x, rGate[None, p].load())
            self.store_vector(row < tile.num_rows, x, self.row_pointer(mO, gO, row), scales)

    @cute.jit
    def store_vector(self, is_stored, x, pointer, scales: Scales):
        """Eight channels of the result."""
        store_16_if(is_stored, x, pointer)

    # Global to shared memory.

    @cute.jit
    def copy_rows(self, mX, gX, sX, stage, first, end, num_rows: cutlass.Constexpr[int], tidx):
        """Starts this thread's copies of the rows from ``first`` on; zeros from ``end`` on."""
        cfg = self.config
        row, vec = tidx // cfg.row_vecs, tidx % cfg.row_vecs
        src = self.row_pointer(mX, gX, first + row)
        for i in cutlass.range_constexpr(num_rows // cfg.copy_rows):
            local = row + i * cfg.copy_rows
            offset = stage * cfg.kv_stage + self.swizzled(local, vec)
            dst = vector_view(sX, offset).iterator
            cp_async_16_or_zero(dst, src, first + local < end)
            src = self.row_pointer(mX, src, cfg.copy_rows)

    # Positions.

    def head_pointer(self, mX: cute.Tensor, b, h, vec) -> cute.Pointer:
        """A 16-byte column in row 0 of a head."""
        offset = Int64(b) * mX.stride[0] + Int64(h) * mX.stride[2] + vec * VEC
        return mX.iterator + cute.assume(offset, divby=VEC)

    def row_pointer(self, mX: cute.Tensor, pointer: cute.Pointer, row) -> cute.Pointer:
        """The same column some rows on."""
        return pointer + cute.assume(Int64(row) * mX.stride[1], divby=VEC)

    def lane_row(self, tile: Tile, i: int, r: int) -> Int32:
        """Query row of this lane's r-th row of its warp's i-th block."""
        first = tile.m0 + warp_index() * self.config.warp_rows
        return first + i * MMA_M + r * 8 + cute.arch.lane_idx() // QUAD

    def swizzled(self, row, vec, first_vec: int = 0, width: int | None = None):
        """Element offset of 16-byte column ``first_vec + vec`` of a row in shared memory.

        Where ``first_vec`` is given, ``first_vec % 8 + vec`` stays below 8: what is left of
        ``first_vec`` is an immediate of the access. Rows are as wide as those of q, k and v, or
        ``width``; where they have but 4 columns, every two of them have the same swizzle.
        """
        width = self.config.row_width if width is None else width
        period = min(width // VEC, 8)
        line = row & 7 if period == 8 else row // (8 // period) & (period - 1)
        column = (first_vec % period + vec) ^ line
        return row * width + column * VEC + first_vec // period * period * VEC

    def accumulator(self, columns: int) -> cute.Tensor:
        """FP32 registers ((column of a pair, row), block, n8), the n8 tiles of a block together."""
        num_tiles = columns // MMA_N
        shape = ((PAIR, ROWS), self.config.warp_blocks, num_tiles)
        layout = cute.make_layout(shape, stride=((1, PAIR), 4 * num_tiles, 4))
        return cute.make_rmem_tensor(layout, Float32)

    def row_registers(self) -> cute.Tensor:
        """(ROW, BLOCK)."""
        return cute.make_rmem_tensor((ROWS, self.config.warp_blocks), Float32)


def warp_index() -> Int32:
    """This warp's number in the CTA, uniform."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx())


@cute.jit
def once_if(flag: Boolean) -> Int32:
    """1 or 0, the count of a loop that stands for an ``if`` around long straight code.

    ptxas would turn such an ``if`` into predicates of every instruction, all of which issue. A loop
    it leaves alone, as long as neither it nor LLVM sees that the count is at most 1.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(flag)]
    )


@cute.jit
def multiply(x: Float32, y: Float32) -> Float32:
    """``x * y`` by an instruction of its own: never part of a multiply-add in one kernel alone."""
    return cute.arch.inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, y]
    )


@cute.jit
def exp2(x: Float32) -> Float32:
    """``2 ** x`` in one instruction."""
    return cute.math.exp2(x, approx=True, ftz=True)


def vector_view(tensor: cute.Tensor, offset, size: int = VEC) -> cute.Tensor:
    """``size`` consecutive elements from a multiple of ``size`` on."""
    iterator = tensor.iterator + cute.assume(offset, divby=size)
    return cute.make_tensor(iterator, cute.make_layout(size))


def fake_operands(config: SdpaPortableConfig) -> tuple:
    """Fake tensors in ``__call__`` order, without the stream; B, S, Sk and strides are dynamic."""
    return (*fake_tensors(config), Float32(1.0))


def fake_tensors(config: SdpaPortableConfig) -> tuple:
    """The tensors among them."""
    batch, rows, keys = (cute.sym_int() for _ in range(3))

    def heads(length, count, dtype, multiple=VEC):
        stride = (*(cute.sym_int64(divisibility=multiple) for _ in range(3)), 1)
        shape = (batch, length, count, config.d_head)
        return make_fake_tensor(DTYPES[dtype], shape, stride, assumed_align=16)

    def compact(dtype, *shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=4)

    vec = 16 // config.element_bytes
    return (
        heads(rows, config.h_q, config.dtype, vec),
        heads(keys, config.h_kv, config.dtype, vec),
        heads(keys, config.h_kv, config.dtype, vec),
        heads(rows, config.h_q, config.o_dtype),
        heads(rows, config.h_q, config.act_dtype) if config.has_gate else None,
        compact(Float32, batch, config.h_q, rows) if config.has_lse else None,
        compact(Int32, batch) if config.has_seq_lens else None,
    )
