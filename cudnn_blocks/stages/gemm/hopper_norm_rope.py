# SPDX-License-Identifier: Apache-2.0
"""QK-norm and RoPE of the Hopper GEMM kernel, on accumulators in registers and in place.

Quad lane ``q`` of an accumulator row holds columns ``8 j + 2 q`` and ``8 j + 2 q + 1`` of every
``j``, of cosines and sines too. The row sum is in the thread and two shuffles; where two CTAs hold
one head, they send each other theirs. Both channels of a pair are in one thread where their
distance is a multiple of 8, else in two lanes of a quad.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr

from cudnn_blocks.stages.device.bf16 import widen
from cudnn_blocks.stages.gemm.hopper_config import (
    FLOAT_BYTES,
    MMA_M,
    SUM_COLUMNS,
    SUM_SLOTS,
    WARPGROUP_THREADS,
    Fragment,
    GemmKernelConfig,
)
from cudnn_blocks.stages.gemm.hopper_schedule import Thread, TileOrigin
from cudnn_blocks.stages.gemm.portable_operands import NormRopeOperands

VEC = 8  # columns of one group: two of every lane of a quad
COS, SIN = range(2)
TABLE_CHUNK = 8  # groups whose cosines and sines are in registers at once


@dataclass(frozen=True)
class SumExchange:
    """Where the other CTA of a pair leaves its sums of squares; tiles alternate between slots."""

    sSum: cute.Tensor
    """(ROW, SLOT, WARPGROUP)"""
    barriers: cute.Pointer
    """(SLOT, WARPGROUP)"""
    peer: Int32
    """Rank of the other CTA in the cluster."""


@dataclass(frozen=True)
class NormRopeRole:
    """QK-norm and RoPE of a tile, for one consumer thread."""

    config: GemmKernelConfig
    thread: Thread
    num_rows: Int32
    operands: NormRopeOperands
    sW: cute.Tensor | None
    """(D, BAND): FP32 norm weights of Q and K."""
    sums: SumExchange | None

    # RoPE tables.

    @property
    def table_groups(self) -> int:
        """Groups of 8 channels that hold what rotates."""
        return -(-self.config.norm_rope.rope_dim // VEC)

    @cute.jit
    def prefetch_tables(self, fragment: cutlass.Constexpr[Fragment], origin: TileOrigin):
        """(E, J, TABLE, R, BLOCK) of this thread's rows; undefined for a plain tile."""
        groups = tuple(range(self.table_groups))
        shape = (2, self.table_groups, 2, 2, fragment.blocks)
        rTables = cute.make_rmem_tensor(shape, self.operands.mCos.element_type)
        if self.has_normed_head(fragment, origin):
            for b in cutlass.range_constexpr(fragment.blocks):
                for r in cutlass.range_constexpr(2):
                    offsets = self.table_offsets(fragment, origin, b, r)
                    self.load_tables(rTables[None, None, None, r, b], offsets, groups)
        return rTables

    @cute.jit
    def table_offsets(
        self,
        fragment: cutlass.Constexpr[Fragment],
        origin: TileOrigin,
        block: cutlass.Constexpr[int],
        r: cutlass.Constexpr[int],
    ) -> tuple[Int64, Int64]:
        """Where the cosines and sines of one row's first columns of this thread are."""
        row = origin.row + self.thread.block_row(fragment, block)
        row += r * 8 + self.thread.lane // 4
        b, s = divmod(row if row < self.num_rows else Int32(0), self.operands.seq_len)
        cos, sin = self.operands.mCos.stride, self.operands.mSin.stride
        first = self.thread.quad_lane * 2
        return (
            cute.assume(Int64(b) * cos[0] + Int64(s) * cos[1] + first, divby=2),
            cute.assume(Int64(b) * sin[0] + Int64(s) * sin[1] + first, divby=2),
        )

    @cute.jit
    def load_tables(
        self, rTables: cute.Tensor, offsets: tuple, groups: cutlass.Constexpr[tuple[int, ...]]
    ):
        """(E, J, TABLE) of one row, for some groups of 8 channels."""
        facts, mTables = self.config.norm_rope, (self.operands.mCos, self.operands.mSin)
        for table in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(len(groups)):
                pair = mTables[table].iterator + offsets[table] + groups[i] * VEC
                gPair = cute.make_tensor(pair, cute.make_layout(2))
                is_loaded = Boolean(True)
                if const_expr((groups[i] + 1) * VEC > facts.rope_dim):
                    is_loaded = groups[i] * VEC + self.thread.quad_lane * 2 < facts.rope_dim
                if is_loaded:
                    cute.autovec_copy(gPair, rTables[None, i, table])

    # Heads.

    def head_columns(self, fragment: Fragment) -> int:
        """Columns of one head that a warpgroup holds."""
        return min(self.config.norm_rope.d_head, fragment.columns)

    def head_index(self, fragment: Fragment, origin: TileOrigin, h: int) -> Int32:
        """The slab's head that the warpgroup's h-th columns belong to."""
        return self.thread.first_column(fragment, origin) // self.config.norm_rope.d_head + h

    @cute.jit
    def is_normed(self, head: Int32) -> Boolean:
        """A head of the bands Q and K."""
        facts = self.config.norm_rope
        k_head = head - facts.first_k_head
        return (head < facts.h_q) | ((k_head >= 0) & (k_head < facts.h_kv))

    @cute.jit
    def has_normed_head(self, fragment: cutlass.Constexpr[Fragment], origin: TileOrigin) -> Boolean:
        """Any of this warpgroup's heads."""
        found = Boolean(False)
        for h in cutlass.range_constexpr(fragment.columns // self.head_columns(fragment)):
            found |= self.is_normed(self.head_index(fragment, origin, h))
        return found

    def heads_of(self, tCrC: cute.Tensor, fragment: Fragment) -> cute.Tensor:
        """(E, J, R, BLOCK, HEAD): the accumulators by head."""
        columns = self.head_columns(fragment)
        layout = cute.make_layout(
            (2, columns // VEC, 2, fragment.blocks, fragment.columns // columns),
            stride=(1, 4, 2, fragment.columns // 2, columns // 2),
        )
        return cute.make_tensor(tCrC.iterator, layout)

    @cute.jit
    def find_scales(
        self,
        rScale: cute.Tensor,
        rHeads: cute.Tensor,
        fragment: cutlass.Constexpr[Fragment],
        origin: TileOrigin,
        exchanges: Int32,
    ) -> Int32:
        """``rsqrt(mean(x * x) + eps)`` of every row and normed head, ``(R, BLOCK, HEAD)``."""
        cfg = self.config
        for h in cutlass.range_constexpr(cute.size(rHeads, mode=[4])):
            if self.is_normed(self.head_index(fragment, origin, h)):
                rSums = rScale[None, None, h]
                for b in cutlass.range_constexpr(fragment.blocks):
                    for r in cutlass.range_constexpr(2):
                        rSums[r, b] = self.row_sum(rHeads[None, None, r, b, h])
                if const_expr(cfg.exchanges_sums):
                    self.exchange_sums(rSums, fragment, exchanges)
                    exchanges += 1
                for i in cutlass.range_constexpr(cute.size(rSums)):
                    mean = rSums[i] * Float32(1.0 / cfg.norm_rope.d_head)
                    rSums[i] = cute.math.rsqrt(mean + self.operands.eps, fastmath=True)
        return exchanges

    @cute.jit
    def row_sum(self, rX: cute.Tensor) -> Float32:
        """Sum of squares of a row over the warpgroup's columns, 128 by 128."""
        total = Float32(0.0)
        groups = cute.size(rX, mode=[1])
        for first in cutlass.range_constexpr(0, groups, SUM_COLUMNS // VEC):
            even, odd = Float32(0.0), Float32(0.0)
            for j in cutlass.range_constexpr(first, min(groups, first + SUM_COLUMNS // VEC)):
                even = cute.math.fma(rX[0, j], rX[0, j], even)
                odd = cute.math.fma(rX[1, j], rX[1, j], odd)
            part = even + odd
            part += cute.arch.shuffle_sync_bfly(part, 1)
            part += cute.arch.shuffle_sync_bfly(part, 2)
            total = part if const_expr(first == 0) else total + part
        return total

    @cute.jit
    def exchange_sums(
        self, rSums: cute.Tensor, fragment: cutlass.Constexpr[Fragment], exchanges: Int32
    ):
        """Adds the sums of the other half of the head, which the other CTA of the pair holds."""
        thread, sums = self.thread, self.sums
        slot, phase = exchanges % SUM_SLOTS, exchanges // SUM_SLOTS % 2
        barrier = sums.barriers + thread.warpgroup * SUM_SLOTS + slot
        rBits = cute.recast_tensor(rSums, Int32)
        for b in cutlass.range_constexpr(fragment.blocks):
            row = thread.block_row(fragment, b) + thread.lane // 4
            if thread.quad_lane == 0:
                for r in cutlass.range_constexpr(2):
                    place = cute.crd2idx((row + r * 8, slot, thread.warpgroup), sums.sSum.layout)
                    destination = sums.sSum.iterator + place
                    cute.arch.store_async_dsmem(destination, rBits[r, b], barrier, sums.peer)
        if thread.tidx % WARPGROUP_THREADS == 0:
            rows = MMA_M * fragment.blocks
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, rows * FLOAT_BYTES)
        cute.arch.mbarrier_wait(barrier, phase)
        for b in cutlass.range_constexpr(fragment.blocks):
            row = thread.block_row(fragment, b) + thread.lane // 4
            for r in cutlass.range_constexpr(2):
                rSums[r, b] = rSums[r, b] + sums.sSum[row + r * 8, slot, thread.warpgroup]

    @cute.jit
    def apply(
        self,
        rHeads: cute.Tensor,
        rScale: cute.Tensor | None,
        fragment: cutlass.Constexpr[Fragment],
        origin: TileOrigin,
        rTables: cute.Tensor | None,
        block: cutlass.Constexpr[int],
    ):
        """Normalises and rotates one block's rows of the heads of the bands Q and K, in place."""
        cfg, facts = self.config, self.config.norm_rope
        channel = Int32(0)
        if const_expr(cfg.joins_heads):
            channel = self.thread.first_column(fragment, origin) % facts.d_head
        for h in cutlass.range_constexpr(cute.size(rHeads, mode=[4])):
            head = self.head_index(fragment, origin, h)
            if self.is_normed(head):
                rHead = rHeads[None, None, None, block, h]
                if const_expr(facts.has_norm):
                    self.normalise(rHead, rScale[None, block, h], head, channel)
                if const_expr(facts.rope_dim > 0):
                    if channel == 0:  # the first half of a joined head has all that rotates
                        self.rotate(rHead, fragment, origin, rTables, block)

    @cute.jit
    def normalise(self, rHead: cute.Tensor, rScale: cute.Tensor, head: Int32, channel: Int32):
        """``x * scale * w`` of both rows of a head, ``(E, J, R)``, from a channel on."""
        band = Int32(0) if head < self.config.norm_rope.h_q else Int32(1)
        first = channel // 2 + self.thread.quad_lane
        rW = cute.make_rmem_tensor(2, Float32)
        for j in cutlass.range_constexpr(cute.size(rHead, mode=[1])):
            cute.autovec_copy(cute.local_tile(self.sW[None, band], (2,), (first + j * 4,)), rW)
            for r in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    rHead[e, j, r] = rHead[e, j, r] * rScale[r] * rW[e]

    # RoPE.

    @cute.jit
    def rotate(
        self,
        rHead: cute.Tensor,
        fragment: cutlass.Constexpr[Fragment],
        origin: TileOrigin,
        rTables: cute.Tensor | None,
        block: cutlass.Constexpr[int],
    ):
        """``x * cos + rotate_half(x) * sin`` of the leading channels of both rows."""
        pairs = self.config.norm_rope.half % VEC == 0
        for r in cutlass.range_constexpr(2):
            rX = rHead[None, None, r]
            rOld = rX
            if const_expr(not pairs):
                rOld = cute.make_rmem_tensor((2, self.table_groups), Float32)
                for e in cutlass.range_constexpr(cute.size(rOld)):
                    rOld[e] = rX[e]
            if const_expr(rTables is not None):
                groups = tuple(range(self.table_groups))
                self.rotate_groups(rX, rOld, rTables[None, None, None, r, block], groups)
            else:
                offsets = self.table_offsets(fragment, origin, block, r)
                chunks = self.table_chunks()
                for chunk in cutlass.range_constexpr(len(chunks)):
                    groups = chunks[chunk]
                    shape = (2, len(groups), 2)
                    rChunk = cute.make_rmem_tensor(shape, self.operands.mCos.element_type)
                    self.load_tables(rChunk, offsets, groups)
                    self.rotate_groups(rX, rOld, rChunk, groups)

    def table_chunks(self) -> tuple[tuple[int, ...], ...]:
        """Groups of 8 channels whose tables are loaded together; both groups of every pair."""
        half, step = self.config.norm_rope.half, TABLE_CHUNK
        if half % VEC:
            groups = range(self.table_groups)
            return tuple(tuple(groups[i : i + step]) for i in range(0, len(groups), step))
        low, high = range(half // VEC), range(half // VEC, self.table_groups)
        step //= 2
        return tuple((*low[i : i + step], *high[i : i + step]) for i in range(0, len(low), step))

    @cute.jit
    def rotate_groups(
        self,
        rX: cute.Tensor,
        rOld: cute.Tensor,
        rTables: cute.Tensor,
        groups: cutlass.Constexpr[tuple[int, ...]],
    ):
        """Some groups of a row, ``(E, J)``; ``rTables`` holds their tables."""
        if const_expr(self.config.norm_rope.half % VEC == 0):
            self.rotate_in_thread(rX, rTables, groups)
        else:
            self.rotate_in_quad(rX, rOld, rTables, groups)

    @cute.jit
    def rotate_in_thread(
        self,
        rX: cute.Tensor,
        rTables: cute.Tensor,
        groups: cutlass.Constexpr[tuple[int, ...]],
    ):
        """A thread holds both channels of its pairs: first all low groups, then the high ones."""
        distance = len(groups) // 2
        for i in cutlass.range_constexpr(distance):
            j, k = groups[i], groups[i + distance]
            cos_j, sin_j = (widened(rTables[None, i, table]) for table in (COS, SIN))
            cos_k, sin_k = (widened(rTables[None, i + distance, table]) for table in (COS, SIN))
            for e in cutlass.range_constexpr(2):
                low, high = rX[e, j], rX[e, k]
                rX[e, j] = low * cos_j[e] - high * sin_j[e]
                rX[e, k] = high * cos_k[e] + low * sin_k[e]

    @cute.jit
    def rotate_in_quad(
        self,
        rX: cute.Tensor,
        rOld: cute.Tensor,
        rTables: cute.Tensor,
        groups: cutlass.Constexpr[tuple[int, ...]],
    ):
        """Pairs whose distance is no multiple of 8 lie in two lanes of a quad."""
        facts = self.config.norm_rope
        for i in cutlass.range_constexpr(len(groups)):
            cos, sin = (widened(rTables[None, i, table]) for table in (COS, SIN))
            for e in cutlass.range_constexpr(2):
                j = groups[i]
                channel = j * VEC + self.thread.quad_lane * 2 + e
                above = self.from_quad(rOld, j, e + facts.half)
                below = self.from_quad(rOld, j, e - facts.half)
                partner = -above if channel < facts.half else below
                turned = rOld[e, j] * cos[e] + partner * sin[e]
                rX[e, j] = turned if channel < facts.rope_dim else rOld[e, j]

    @cute.jit
    def from_quad(
        self, rX: cute.Tensor, j: cutlass.Constexpr[int], distance: cutlass.Constexpr[int]
    ) -> Float32:
        """Column ``8 j + 2 q + distance`` of the row, from the lane that holds it; 0 outside."""
        e, lanes = distance % 2, distance // 2
        shift, j = lanes % 4, j + lanes // 4
        first, second = (self.element(rX, e, i) for i in (j, j + 1))
        if const_expr(shift == 0):
            value = first
        else:
            lane = self.thread.lane
            value = first if lane % 4 >= shift else second
            value = cute.arch.shuffle_sync(value, lane // 4 * 4 + (lane + shift) % 4)
        return value

    def element(self, rX: cute.Tensor, e: int, j: int) -> Float32:
        """An element, or 0 outside the tensor."""
        return rX[e, j] if 0 <= j < cute.size(rX, mode=[1]) else Float32(0.0)


@cute.jit
def widened(rPair: cute.Tensor) -> cute.TensorSSA:
    """``float(x)`` of two neighbouring channels of a table."""
    x = rPair.load()
    return widen(x) if const_expr(rPair.element_type is BFloat16) else x.to(Float32)
