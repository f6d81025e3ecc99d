# SPDX-License-Identifier: Apache-2.0
"""Epilogue of the Hopper SDPA kernel: normalise, gate, store, from accumulators in registers.

A quad lane holds two neighbouring channels of every eight. The four lanes of a quad transpose four
such words, by two shuffles each way, so that every lane owns 8 consecutive channels of every 32:
loads and stores are 16 bytes, and no shared memory is needed, which the loads of the next tile are
filling by then.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from cudnn_blocks.stages.attention.hopper_config import VEC, WARPGROUP_THREADS, SdpaConfig
from cudnn_blocks.stages.attention.hopper_schedule import Extents, QueryTile
from cudnn_blocks.stages.attention.hopper_softmax import ROWS, packed, packed_codes
from cudnn_blocks.stages.device.bf16 import widen
from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.device.masked_store import store_16_if, store_words_if
from cudnn_blocks.stages.device.prefetch import prefetch_l2_line
from cudnn_blocks.stages.device.sigmoid import sigmoid

GROUP = 32  # channels that a quad transposes at a time
PAIRS = 4  # 32-bit words of one access
GATES_AHEAD = 4  # loads of the gate in flight; the first start ahead of the epilogue
LINE = 64  # elements of a 128-byte line
LN_2 = 0.6931471805599453


@dataclass(frozen=True)
class Thread:
    """Place of a consumer thread in the accumulators."""

    tidx: Int32
    warpgroup: Int32

    @property
    def lane(self) -> Int32:
        """Lane of its warp."""
        return self.tidx % 32

    @property
    def quad_lane(self) -> Int32:
        """Which pair of every eight columns."""
        return self.tidx % 4

    @property
    def warp_row(self) -> Int32:
        """First row of the warp within the tile."""
        return self.warpgroup * 64 + self.tidx % WARPGROUP_THREADS // 32 * 16

    @property
    def row(self) -> Int32:
        """First of the thread's two rows within the tile; the other is 8 further."""
        return self.warp_row + self.lane // 4


@dataclass(frozen=True)
class GateLoads:
    """A thread's vectors of the gate, row by row, some of them ahead of their use."""

    rows: list[cute.Pointer]
    rGate: cute.Tensor | None
    """(PAIR, AHEAD)"""

    @cute.jit
    def load(self, i: cutlass.Constexpr[int], groups: cutlass.Constexpr[int]):
        """The ``i``-th vector, if there is one; a row has ``groups``."""
        if const_expr(i < ROWS * groups):
            load_16(self.rGate[None, i % GATES_AHEAD], self.rows[i // groups] + i % groups * GROUP)


@dataclass(frozen=True)
class Scales:
    """Run-time factors."""

    scores: Float32
    """To base 2."""
    slack: Float32
    """What a score may exceed the reference maximum by."""
    value: Float32 | None = None
    """Of codes: what V is descaled by."""
    codes: Float32 | None = None
    """What the result is scaled by before it becomes codes."""


@dataclass(frozen=True)
class EpilogueRole:
    """Everything after the last product of a tile, for one consumer thread."""

    config: SdpaConfig
    thread: Thread
    extents: Extents
    mO: cute.Tensor
    mGate: cute.Tensor | None
    mLse: cute.Tensor | None
    scales: Scales

    @cute.jit
    def prefetch_gate(self, tile: QueryTile, row: Int32):
        """The 16 rows of the warp into L2; two lanes a row. ``row`` is the warp's first."""
        cfg, lane = self.config, self.thread.lane
        row = cutlass.min(row + lane // 2, self.extents.seqlen_q - 1)
        half = cfg.d_head // 2
        ptr = row_pointer(self.mGate, tile, row, lane % 2 * half)
        for i in cutlass.range_constexpr((half - 1) // LINE + 1):
            prefetch_l2_line(ptr + i * LINE)

    @cute.jit
    def start_gate(self, tile: QueryTile, row: Int32) -> GateLoads:
        """Starts the first loads of the thread's gate; ``row`` is its first."""
        cfg = self.config
        groups = cfg.d_head // GROUP
        channel = self.thread.quad_lane * VEC
        last = self.extents.seqlen_q - 1
        loads = GateLoads([], None)
        if const_expr(cfg.has_gate):
            rows = [cutlass.min(row + 8 * r, last) for r in range(ROWS)]
            loads = GateLoads(
                [row_pointer(self.mGate, tile, gate_row, channel) for gate_row in rows],
                cute.make_rmem_tensor((PAIRS, GATES_AHEAD), Int32),
            )
            for i in cutlass.range_constexpr(GATES_AHEAD):
                loads.load(i, groups)
        return loads

    @cute.jit
    def store(
        self,
        rO: cute.Tensor,
        rSum: cute.Tensor,
        rMax: cute.Tensor,
        gate: GateLoads,
        tile: QueryTile,
        row: Int32,
    ):
        """``act(O / sum)``, gated where asked for; ``row`` is the thread's first."""
        cfg = self.config
        groups = cfg.d_head // GROUP
        channel = self.thread.quad_lane * VEC
        last = self.extents.seqlen_q - 1
        totals = [self.row_sum(rSum[r]) for r in range(ROWS)]
        is_dead = [total == 0.0 for total in totals]  # not so for NaN, which has to show
        self.clear_dead_rows(rO, is_dead)
        for r in cutlass.range_constexpr(ROWS):
            inverse = 0.0 if is_dead[r] else cute.math.rcp(totals[r], approx=True, ftz=True)
            if const_expr(cfg.is_fp8):
                inverse = inverse * self.scales.value
            is_inside = row + 8 * r <= last
            if const_expr(cfg.has_lse):
                self.store_lse(totals[r], rMax[r], is_dead[r], is_inside, tile, row + 8 * r)
            gO = row_pointer(self.mO, tile, row + 8 * r, channel)
            for g in cutlass.range_constexpr(groups):
                rY = self.transpose(self.normalised(rO, inverse, r, g))
                if const_expr(cfg.has_gate):
                    i = r * groups + g
                    self.apply_gate(rY, gate.rGate[None, i % GATES_AHEAD])
                    gate.load(i + GATES_AHEAD, groups)
                if const_expr(cfg.has_o_codes):
                    store_words_if(is_inside, self.codes(rY), gO + g * GROUP)
                else:
                    y = cute.recast_tensor(rY, DTYPES[cfg.act_dtype]).load()
                    store_16_if(is_inside, y, gO + g * GROUP)

    @cute.jit
    def row_sum(self, part: Float32) -> Float32:
        """Over the quad."""
        part += cute.arch.shuffle_sync_bfly(part, 1)
        return part + cute.arch.shuffle_sync_bfly(part, 2)

    @cute.jit
    def clear_dead_rows(self, rO: cute.Tensor, is_dead: list):
        """0 in rows that saw no key: weights of 0 do not hide NaN. Most often only a vote."""
        if cute.arch.vote_any_sync(is_dead[0] | is_dead[1]):
            for j in cutlass.range_constexpr(self.config.d_head // 8):
                for r in cutlass.range_constexpr(ROWS):
                    for e in cutlass.range_constexpr(2):
                        i = 4 * j + 2 * r + e
                        rO[i] = Float32(0.0) if is_dead[r] else rO[i]

    @cute.jit
    def normalised(
        self,
        rO: cute.Tensor,
        inverse: Float32,
        r: cutlass.Constexpr[int],
        g: cutlass.Constexpr[int],
    ) -> cute.Tensor:
        """(PAIR): the thread's channels of a group, rounded."""
        rPairs = cute.make_rmem_tensor((PAIRS,), Int32)
        for j in cutlass.range_constexpr(PAIRS):
            i = 4 * (PAIRS * g + j) + 2 * r
            rPairs[j] = packed(rO[i] * inverse, rO[i + 1] * inverse, self.config.act_dtype)
        return rPairs

    @cute.jit
    def transpose(self, rX: cute.Tensor) -> cute.Tensor:
        """(PAIR): word ``j`` of lane ``q`` becomes word ``q`` of lane ``j`` of the quad."""
        is_odd = self.thread.quad_lane % 2 == 1
        is_upper = self.thread.quad_lane >= 2
        rHalf = cute.make_rmem_tensor((PAIRS,), Int32)
        rY = cute.make_rmem_tensor((PAIRS,), Int32)
        for p in cutlass.range_constexpr(2):
            kept = rX[2 * p + 1] if is_odd else rX[2 * p]
            sent = rX[2 * p] if is_odd else rX[2 * p + 1]
            got = cute.arch.shuffle_sync_bfly(sent, 1)
            rHalf[2 * p] = got if is_odd else kept
            rHalf[2 * p + 1] = kept if is_odd else got
        for i in cutlass.range_constexpr(2):
            kept = rHalf[2 + i] if is_upper else rHalf[i]
            sent = rHalf[i] if is_upper else rHalf[2 + i]
            got = cute.arch.shuffle_sync_bfly(sent, 2)
            rY[i] = got if is_upper else kept
            rY[2 + i] = kept if is_upper else got
        return rY

    @cute.jit
    def apply_gate(self, rY: cute.Tensor, rGate: cute.Tensor):
        """``act(float(o) * sigmoid(float(gate)))`` in place, as the gate's own kernel rounds it."""
        dtype = DTYPES[self.config.act_dtype]
        rAct = cute.recast_tensor(rY, dtype)
        o, gate = self.widened(rY), self.widened(rGate)
        rWide = cute.make_rmem_tensor((2 * PAIRS,), Float32)
        for i in cutlass.range_constexpr(2 * PAIRS):
            rWide[i] = o[i] * sigmoid(gate[i])
        rAct.store(rWide.load().to(dtype))

    @cute.jit
    def widened(self, rX: cute.Tensor) -> cute.TensorSSA:
        """FP32 values of words of the activation dtype."""
        rWords = cute.make_rmem_tensor((PAIRS,), Int32)
        for i in cutlass.range_constexpr(PAIRS):
            rWords[i] = rX[i]
        x = cute.recast_tensor(rWords, DTYPES[self.config.act_dtype]).load()
        if const_expr(self.config.act_dtype == "bf16"):
            return widen(x)
        return x.to(Float32)

    @cute.jit
    def codes(self, rY: cute.Tensor) -> cute.Tensor:
        """(2): eight rounded results as e4m3 codes."""
        y, scale = self.widened(rY), self.scales.codes
        rWords = cute.make_rmem_tensor((2,), Int32)
        for i in cutlass.range_constexpr(2):
            rWords[i] = packed_codes(*(y[4 * i + j] * scale for j in range(4)))
        return rWords

    @cute.jit
    def store_lse(
        self,
        total: Float32,
        top: Float32,
        is_dead: Boolean,
        is_inside: Boolean,
        tile: QueryTile,
        row: Int32,
    ):
        """``ln(sum exp(scale * QK))``; -inf in a row that saw no key."""
        mLse = self.mLse
        lse = cute.math.log2(total, approx=True)
        if const_expr(self.config.weight_bits):
            lse -= self.config.weight_bits
        lse = (lse + top * self.scales.scores) * LN_2
        lse = -Float32.inf if is_dead else lse
        if is_inside & (self.thread.quad_lane == 0):
            mLse[tile.batch, tile.head, row] = lse


@cute.jit
def row_pointer(mX: cute.Tensor, tile: QueryTile, row: Int32, channel: Int32) -> cute.Pointer:
    """Channel ``channel``, a multiple of 8, of a row of ``[B, S, H, D]``; 64-bit arithmetic."""
    offset = Int64(tile.batch) * mX.stride[0] + Int64(row) * mX.stride[1]
    offset += Int64(tile.head) * mX.stride[2] + Int64(channel)
    return mX.iterator + cute.assume(offset, divby=VEC)


@cute.jit
def load_16(rX: cute.Tensor, ptr: cute.Pointer):
    """16 bytes."""
    gX = cute.make_tensor(cute.recast_ptr(ptr, dtype=Int32), cute.make_layout(PAIRS))
    cute.autovec_copy(gX, rX)
