# SPDX-License-Identifier: Apache-2.0
"""Matrix product of a few activations with block-scaled e4m3 weights (sm_80 and newer).

    W[n, k] = B(code[n, k] * 2 ** exponent[n, k // 32])     B rounds to BF16; exact but at its ends
    acc[m, n] = sum_k f32(x[m, k]) * f32(W[n, k])           FP32
    y[m, n] = B(alpha * acc[m, n])

Weights are read once, so this is bound by memory, and next by what it takes to make them BF16. They
go to shared memory in 16-byte cp.async, in a ring that belongs to each thread alone, and become
BF16 in its registers. They are the 16-row side of mma.sync m16n8k16, x the 8-column side.

Grid:          (clusters along N x CTAs of a cluster, tiles of tokens), one CTA to an SM. The CTAs
               of a cluster (sm_90 and newer) have the same ``groups`` of 32 weight rows, and a part
               of K each.
Warps:         a CTA's units, of a group and a step of K, are numbered group by group. A warp takes
               a range of them, the same number in every warp, one more or less. The rows of a group
               are 8 neighbours, 4 times 32 apart, whose scales are 16 neighbouring bytes of the
               blob for 4 blocks of K.
K:             a step is 128 elements. A lane's 16-byte load is one operand of several products, so
               the order of K inside of them is the codes', not memory's; x goes into shared memory
               in that order.
Pipeline:      x of ``turn_steps`` steps, by all threads; ``depth`` units of codes and scales on
               their way at once, into places that only the thread which asked for them reads. So
               the only barriers are those around x, and one before the sums.
Shared memory: FP32 sums, ``(group + warp, token, row)``; rows of x, whose 16-byte columns are
               XOR-ed so that 8 lanes meet 8 bank groups; the ring, ``(depth, vector, thread)`` of
               16 bytes.
Sums:          a warp stores its sums of a group when it leaves the group, and adds to them in later
               turns. At the end they are added in the order of CTAs, then of warps, whatever comes
               first: the bits are the same in every run. CTAs of a cluster read each other's, and
               each stores a part of y.
Edges:         rows past N, K past its end and padding of the blob are not read.
Overlap:       with PDL a CTA of the next grid starts when one leaves its SM. Before the wait it
               asks its weights and scales into L2, where they are coherent, unless they are too
               many; all else of memory is touched after it.
Requires:      K a multiple of 32, N of 8; 16-byte aligned rows of x, codes and y; B * S up to
               2**31 - 2**16 rows.
Source:        written for this project; scale blobs after the F8_128x4 layout of cudnn-frontend. No
               code copied.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cudnn_blocks.stages.dequant_gemm.portable_e4m3_config import (
    GROUP_ROWS,
    LOADS,
    MMA_N,
    SLOTS,
    VECTORS,
    E4m3DecodeConfig,
    smem_bytes,
    sums_bytes,
    x_bytes,
)
from cudnn_blocks.stages.dequant_gemm.portable_layout import (
    BLOB_COLUMNS,
    BLOB_ROWS,
    BLOB_TILE,
    COLUMN_BYTES,
    STEP,
    STORE,
    VECTOR_BYTES,
    WARP_THREADS,
)
from cudnn_blocks.stages.dequant_gemm.portable_operands import (
    VEC,
    WORDS,
    Operands,
    blob_columns,
    fake_operands,
    load_sums,
    store_outputs,
    words_view,
)
from cudnn_blocks.stages.device.cp_async import cp_async_16_or_zero
from cudnn_blocks.stages.device.packed_codes import (
    E4M3_EXPONENT,
    E4M3_ORDER,
    EVERY_SIGN,
    e4m3_nan_bits,
    e4m3_patterns,
    e8m0_pattern_factor,
    e8m0_rest,
    multiply_bf16x2,
    saturate_bf16x2,
    with_e4m3_nans,
)
from cudnn_blocks.stages.device.prefetch import prefetch_l2
from cudnn_blocks.stages.gemm.portable_operands import rows_of

__all__ = ["E4m3DecodeKernel", "fake_operands"]

CHUNKS = 4  # vectors of x, of 8 elements each, that a lane's codes of a row and step meet
STEP_VECS = STEP // VEC
QUAD_BYTES = 64  # of a load by the 4 lanes of a row
BLOCK = 32  # elements under a scale
NEIGHBOURS = 8  # weight rows
MMA_M, MMA_K = 16, 16
X_BATCH = 4  # vectors of x that a thread has on their way at once


@dataclass(frozen=True)
class Place:
    """Where a thread is."""

    tidx: Int32
    cluster: Int32
    """Along N."""
    rank: Int32
    """CTA within the cluster."""
    first_token: Int32

    @property
    def lane(self) -> Int32:
        """Within the warp."""
        return self.tidx % WARP_THREADS

    @property
    def quad_lane(self) -> Int32:
        """Within the 4 lanes that share a weight row."""
        return self.tidx % 4

    @property
    def warp(self) -> Int32:
        """Within the CTA, known to be the same in all its lanes."""
        return cute.arch.make_warp_uniform(self.tidx // WARP_THREADS)


@dataclass(frozen=True)
class Rows:
    """The 32 weight rows of a group."""

    group: Int32
    """Over all of them."""
    lane: Int32

    @property
    def blob_tile(self) -> Int32:
        """Row tile of the blob."""
        return self.group // SLOTS

    @property
    def blob_row(self) -> Int32:
        """The first of the lane's 4 rows, within the blob's tile."""
        return self.group % SLOTS * NEIGHBOURS + self.lane // 4

    def row(self, slot) -> Int32:
        """A row of the lane."""
        return self.blob_tile * BLOB_TILE + self.blob_row + slot * BLOB_ROWS


@dataclass(frozen=True)
class Unit:
    """A group and a step of K."""

    rows: Rows
    step: Int32
    """Over all of K."""
    is_inside: Boolean
    """It exists: the group, the step, and the turn."""


class E4m3DecodeKernel:
    """The product; see the module docstring."""

    def __init__(self, config: E4m3DecodeConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        w_sf: cute.Tensor,
        y: cute.Tensor,
        alpha: Float32,
        stream,
    ):
        cfg = self.config
        operands = Operands(rows_of(x), w, w_sf, rows_of(y), alpha)
        m, n = operands.mY.shape
        self.kernel(operands).launch(
            grid=(cfg.clusters(n) * cfg.splits, (m - 1) // cfg.tokens + 1, 1),
            block=(cfg.threads, 1, 1),
            cluster=(cfg.splits, 1, 1) if cfg.splits > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            use_pdl=cfg.use_pdl,
        )

    @cute.kernel
    def kernel(self, operands: Operands):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, token_tile, _ = cute.arch.block_idx()
        place = Place(tidx, bidx // cfg.splits, bidx % cfg.splits, token_tile * cfg.tokens)
        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            if const_expr(cfg.prefetches):
                self.prefetch(operands, place)
            cute.arch.griddepcontrol_wait()
        smem = SmemAllocator()
        sPart = smem.allocate_tensor(
            Float32, cute.make_layout(smem_bytes(cfg) // 4), byte_alignment=128
        )
        words = cute.recast_ptr(sPart.iterator, dtype=Uint32) + sums_bytes(cfg) // 4
        sX = cute.make_tensor(words, cute.make_layout(x_bytes(cfg) // 4))
        ring_words = (smem_bytes(cfg) - sums_bytes(cfg) - x_bytes(cfg)) // 4
        sCodes = cute.make_tensor(words + x_bytes(cfg) // 4, cute.make_layout(ring_words))
        self.accumulate(operands, sPart, sX, sCodes, place)
        if const_expr(cfg.splits > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        self.finish(operands, sPart, place)
        if const_expr(cfg.splits > 1):
            # No CTA leaves while another reads its sums.
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    # Mainloop.

    @cute.jit
    def accumulate(
        self,
        operands: Operands,
        sPart: cute.Tensor,
        sX: cute.Tensor,
        sCodes: cute.Tensor,
        place: Place,
    ):
        """Leaves this warp's sums of every group that it has a part of."""
        cfg = self.config
        begin, end = self.own_units(place)
        # ((2, 2), m16, n8) of a thread: 32 weight rows by the CTA's tokens.
        layout = cute.make_layout(((2, 2), SLOTS // 2, cfg.tokens // MMA_N))
        tCrC = cute.make_rmem_tensor(layout, Float32)
        tCrC.fill(0.0)
        rCodes = cute.make_rmem_tensor((WORDS, LOADS, SLOTS), Uint32)
        rScales = cute.make_rmem_tensor(SLOTS, Uint32)
        rX = cute.make_rmem_tensor((WORDS, X_BATCH), Uint32)
        self.load_x(operands, rX, Int32(0), Int32(0), place)
        next_turn, next_unit = Int32(0), begin
        for slot in cutlass.range(cfg.depth, unroll=1):
            self.fetch(operands, sCodes, slot, next_turn, next_unit, end, place)
            next_turn, next_unit = self.following(next_turn, next_unit, begin, end)
        self.store_x(sX, rX, Int32(0), place)
        self.fill_x(operands, sX, rX, Int32(0), 1, place)
        cute.arch.sync_threads()
        slot = Int32(0)
        for turn in cutlass.range(cfg.turns, unroll=1):
            if turn > 0:
                cute.arch.sync_threads()
                self.fill_x(operands, sX, rX, turn, 0, place)
                cute.arch.sync_threads()
            for number in cutlass.range(begin, end, unroll=1):
                step = number % cfg.turn_steps
                cute.arch.cp_async_wait_group(cfg.depth - 1)
                self.collect(operands, sCodes, rCodes, rScales, slot, turn, number, place)
                if cute.arch.vote_any_sync(self.is_special(rCodes, rScales)):
                    self.multiply_carefully(tCrC, sCodes, rScales, slot, sX, step, place)
                else:
                    self.multiply(tCrC, rCodes, rScales, sX, step, place)
                if const_expr(cfg.refetches):
                    self.fetch(operands, sCodes, slot, next_turn, next_unit, end, place)
                    next_turn, next_unit = self.following(next_turn, next_unit, begin, end)
                else:
                    cute.arch.cp_async_commit_group()
                slot = slot + 1 if slot + 1 < cfg.depth else Int32(0)
                if (step == cfg.turn_steps - 1) | (number == end - 1):
                    self.stage_sums(tCrC, sPart, number // cfg.turn_steps, turn, place)
                    tCrC.fill(0.0)

    def share(self, operands: Operands) -> Int32:
        """Steps of K of a CTA."""
        num_steps = (operands.mX.shape[1] - 1) // STEP + 1
        return (num_steps - 1) // self.config.splits + 1

    def own_units(self, place: Place):
        """The first of this warp's units of a turn, and the one past its last."""
        cfg = self.config
        own, following = (cutlass.min(place.warp + i, cfg.busy_warps) for i in range(2))
        return cfg.first_unit(own), cfg.first_unit(following)

    @cute.jit
    def following(self, turn: Int32, unit: Int32, begin: Int32, end: Int32):
        """The turn and unit after these of a warp."""
        is_last = unit + 1 >= end
        return turn + 1 if is_last else turn, begin if is_last else unit + 1

    def unit(self, operands: Operands, turn: Int32, unit: Int32, place: Place) -> Unit:
        """What a number of a turn stands for."""
        cfg = self.config
        n, k = operands.mW.shape[0], operands.mX.shape[1]
        group = place.cluster * cfg.groups + unit // cfg.turn_steps
        own = turn * cfg.turn_steps + unit % cfg.turn_steps
        share = self.share(operands)
        step = place.rank * share + own
        is_inside = (own < share) & (step * STEP < k) & (group // SLOTS * BLOB_TILE < n)
        return Unit(Rows(group, place.lane), step, is_inside)

    @cute.jit
    def prefetch(self, operands: Operands, place: Place):
        """Asks for all weights and scales of this CTA, a row of codes or a tile's scales each."""
        cfg = self.config
        n, row_bytes = operands.mW.shape
        share_bytes = self.share(operands) * STEP
        first_byte = place.rank * share_bytes
        num_bytes = cutlass.min(share_bytes, row_bytes - first_byte)
        for i in cutlass.range(place.tidx, cfg.groups * GROUP_ROWS, cfg.threads, unroll=1):
            rows = Rows(place.cluster * cfg.groups + i // GROUP_ROWS, i % NEIGHBOURS * 4)
            row = rows.row(i % GROUP_ROWS // NEIGHBOURS)
            if (num_bytes > 0) & (row < n):
                offset = Int64(row) * operands.mW.stride[0] + first_byte
                prefetch_l2(operands.mW.iterator + offset, num_bytes)
        # A tile of the blob has the scales of 4 groups, column after column.
        row_columns = blob_columns(operands, BLOCK)
        columns = self.share(operands) * (STEP // (BLOB_COLUMNS * BLOCK))
        first_column = place.rank * columns
        num_columns = cutlass.min(columns, row_columns - first_column)
        tile = place.cluster * cfg.groups // SLOTS + place.tidx
        last_tile = (place.cluster * cfg.groups + (cfg.groups - 1)) // SLOTS
        if (num_columns > 0) & (tile <= last_tile) & (tile * BLOB_TILE < n):
            offset = (Int64(tile) * row_columns + first_column) * COLUMN_BYTES
            prefetch_l2(operands.mSF.iterator + offset, num_columns * COLUMN_BYTES)

    @cute.jit
    def fetch(
        self,
        operands: Operands,
        sCodes: cute.Tensor,
        slot: Int32,
        turn: Int32,
        number: Int32,
        end: Int32,
        place: Place,
    ):
        """Starts this thread's codes and scales of a unit on their way; zeros outside."""
        cfg = self.config
        n, row_bytes = operands.mW.shape
        if (turn < cfg.turns) & (number < end):
            unit = self.unit(operands, turn, number, place)
            for i in cutlass.range_constexpr(LOADS):
                byte = self.first_byte(unit.step, i, place)
                is_inside = unit.is_inside & (byte < row_bytes)
                for s in cutlass.range_constexpr(SLOTS):
                    row = unit.rows.row(s)
                    offset = Int64(row) * operands.mW.stride[0] + byte
                    cp_async_16_or_zero(
                        sCodes.iterator + self.ring_offset(slot, i * SLOTS + s, place),
                        operands.mW.iterator + cute.assume(offset, divby=VECTOR_BYTES),
                        is_inside & (row < n),
                    )
                if const_expr(i == 0):
                    cp_async_16_or_zero(
                        sCodes.iterator + self.ring_offset(slot, LOADS * SLOTS, place),
                        operands.mSF.iterator + self.scale_offset(operands, unit),
                        is_inside,
                    )
        cute.arch.cp_async_commit_group()

    @cute.jit
    def collect(
        self,
        operands: Operands,
        sCodes: cute.Tensor,
        rCodes: cute.Tensor,
        rScales: cute.Tensor,
        slot: Int32,
        turn: Int32,
        number: Int32,
        place: Place,
    ):
        """Codes ``(WORD, LOAD, SLOT)`` and scale words ``(SLOT)`` of a unit that has arrived."""
        for i in cutlass.range_constexpr(LOADS):
            for s in cutlass.range_constexpr(SLOTS):
                offset = self.ring_offset(slot, i * SLOTS + s, place)
                cute.autovec_copy(words_view(sCodes, offset), rCodes[None, i, s])
        offset = self.ring_offset(slot, LOADS * SLOTS, place)
        cute.autovec_copy(words_view(sCodes, offset), rScales)
        # Padding may be NaN, of which zeros times NaN would make more.
        step = self.unit(operands, turn, number, place).step
        is_inside = self.first_byte(step, LOADS - 1, place) < operands.mW.shape[1]
        for s in cutlass.range_constexpr(SLOTS):
            rScales[s] = rScales[s] if is_inside else rScales[s] & Uint32(0xFFFF)

    def first_byte(self, step: Int32, load: int, place: Place) -> Int32:
        """Place of a load in its row of codes."""
        return step * STEP + load * QUAD_BYTES + place.quad_lane * VECTOR_BYTES

    def ring_offset(self, slot: Int32, vector: int, place: Place) -> Int32:
        """Word offset of this thread's vector."""
        cfg = self.config
        return ((slot * VECTORS + vector) * cfg.threads + place.tidx) * WORDS

    def scale_offset(self, operands: Operands, unit: Unit) -> Int64:
        """Place in the blob of 4 scales for each of this thread's rows."""
        tile = Int64(unit.rows.blob_tile) * blob_columns(operands, BLOCK) + unit.step
        offset = (tile * BLOB_ROWS + unit.rows.blob_row) * (SLOTS * BLOB_COLUMNS)
        return cute.assume(offset, divby=VECTOR_BYTES)

    # Activations.

    @property
    def x_vecs(self) -> int:
        """Vectors of a token and turn."""
        return self.config.turn_steps * STEP_VECS

    @property
    def x_batches(self) -> int:
        """Batches of x of a turn."""
        return (self.config.tokens * self.x_vecs - 1) // (self.config.threads * X_BATCH) + 1

    @cute.jit
    def fill_x(
        self,
        operands: Operands,
        sX: cute.Tensor,
        rX: cute.Tensor,
        turn: Int32,
        first: cutlass.Constexpr[int],
        place: Place,
    ):
        """Brings a turn's batches from ``first`` on to shared memory."""
        for batch in cutlass.range(first, self.x_batches, unroll=1):
            self.load_x(operands, rX, turn, batch, place)
            self.store_x(sX, rX, batch, place)

    @cute.jit
    def load_x(
        self,
        operands: Operands,
        rX: cute.Tensor,
        turn: Int32,
        batch: Int32,
        place: Place,
    ):
        """A batch of this thread's vectors of a turn; zeros past the edges."""
        cfg = self.config
        m, k = operands.mX.shape
        share = self.share(operands)
        for i in cutlass.range_constexpr(X_BATCH):
            token, vec = self.x_place(batch, i, place)
            row = place.first_token + token
            own = turn * (cfg.turn_steps * STEP) + vec * VEC
            column = place.rank * share * STEP + own
            for word in cutlass.range_constexpr(WORDS):
                rX[word, i] = Uint32(0)
            # What the next CTA has is zero here, as its codes are: zero times Inf is not.
            if (token < cfg.tokens) & (row < m) & (own < share * STEP) & (column < k):
                offset = Int64(row) * operands.mX.stride[0] + column
                x_words = cute.recast_ptr(
                    operands.mX.iterator + cute.assume(offset, divby=VEC), dtype=Uint32
                )
                gX = cute.make_tensor(x_words, cute.make_layout(WORDS))
                cute.autovec_copy(gX, rX[None, i])

    @cute.jit
    def store_x(self, sX: cute.Tensor, rX: cute.Tensor, batch: Int32, place: Place):
        """A batch to shared memory, in the order of codes."""
        for i in cutlass.range_constexpr(X_BATCH):
            token, vec = self.x_place(batch, i, place)
            if token < self.config.tokens:
                rOrdered = self.ordered(rX[None, i])
                cute.autovec_copy(rOrdered, words_view(sX, self.vec_offset(token, vec)))

    def x_place(self, batch: Int32, i: int, place: Place):
        """Token and vector of the turn that a thread brings."""
        number = (batch * X_BATCH + i) * self.config.threads + place.tidx
        return number // self.x_vecs, number % self.x_vecs

    def ordered(self, rX: cute.Tensor) -> cute.Tensor:
        """A vector of x in the order of its codes."""
        order = tuple(4 * half + i for half in range(2) for i in E4M3_ORDER)
        rOrdered = cute.make_rmem_tensor(WORDS, Uint32)
        for i in range(WORDS):
            low, high = (rX[element // 2] for element in order[2 * i : 2 * i + 2])
            is_upper = order[2 * i] % 2
            if is_upper:
                rOrdered[i] = low >> 16 | high & Uint32(0xFFFF0000)
            else:
                rOrdered[i] = low & Uint32(0xFFFF) | high << 16
        return rOrdered

    def vec_offset(self, token, vec):
        """Word offset in shared memory of a vector of a token."""
        swizzled = vec ^ (vec >> 3 & 1) ^ (token & 1) * 3
        return token * (self.x_vecs * WORDS) + swizzled * WORDS

    # Weights.

    @cute.jit
    def multiply(
        self,
        tCrC: cute.Tensor,
        rCodes: cute.Tensor,
        rScales: cute.Tensor,
        sX: cute.Tensor,
        step: Int32,
        place: Place,
    ):
        """A unit's products, 8 elements of K of every lane at a time."""
        factors = [self.factors(rScales[s], place) for s in range(SLOTS)]
        rW = cute.make_rmem_tensor((WORDS, SLOTS), Uint32)
        for c in cutlass.range_constexpr(CHUNKS):
            for s in cutlass.range_constexpr(SLOTS):
                patterns = both_patterns(self.chunk_words(rCodes[None, None, s], c))
                for i in cutlass.range_constexpr(WORDS):
                    rW[i, s] = multiply_bf16x2(patterns[i], factors[s][c // 2])
            self.multiply_chunk(tCrC, rW, sX, step, Int32(c), place)

    @cute.jit
    def multiply_carefully(
        self,
        tCrC: cute.Tensor,
        sCodes: cute.Tensor,
        rScales: cute.Tensor,
        slot: Int32,
        sX: cute.Tensor,
        step: Int32,
        place: Place,
    ):
        """The same where a factor is not all of a scale, or a code may be NaN."""
        rW = cute.make_rmem_tensor((WORDS, SLOTS), Uint32)
        for c in cutlass.range(CHUNKS, unroll=1):
            for s in cutlass.range_constexpr(SLOTS):
                first_word = self.ring_offset(slot, c // 2 * SLOTS + s, place) + c % 2 * 2
                words = (sCodes[first_word], sCodes[first_word + 1])
                code = self.scale_code(rScales[s], c // 2, place)
                factor = e8m0_pattern_factor(code, E4M3_EXPONENT)
                rest = e8m0_rest(code, E4M3_EXPONENT)
                patterns = both_patterns(words)
                for i in cutlass.range_constexpr(WORDS):
                    rW[i, s] = multiply_bf16x2(patterns[i], factor)
                for i in cutlass.range_constexpr(2):
                    first, second = with_e4m3_nans(words[i], rW[2 * i, s], rW[2 * i + 1, s])
                    rW[2 * i, s] = first
                    rW[2 * i + 1, s] = second
                for i in cutlass.range_constexpr(WORDS):
                    rW[i, s] = saturate_bf16x2(multiply_bf16x2(rW[i, s], rest))
            self.multiply_chunk(tCrC, rW, sX, step, c, place)

    @cute.jit
    def multiply_chunk(
        self,
        tCrC: cute.Tensor,
        rW: cute.Tensor,
        sX: cute.Tensor,
        step: Int32,
        chunk: Int32,
        place: Place,
    ):
        """Products of 8 weights of each slot, ``(WORD, SLOT)``, with all tokens."""
        op = warp.MmaF16BF16Op(BFloat16, Float32, (MMA_M, MMA_N, MMA_K))
        mma_atom = cute.make_mma_atom(op)
        tCrA = weight_fragments(rW)
        vec = step * STEP_VECS + self.chunk_vec(chunk, place.quad_lane)
        for j in cutlass.range_constexpr(self.config.tokens // MMA_N):
            rX = cute.make_rmem_tensor(WORDS, Uint32)
            token = j * MMA_N + place.lane // 4
            cute.autovec_copy(words_view(sX, self.vec_offset(token, vec)), rX)
            values = cute.recast_ptr(rX.iterator, dtype=BFloat16)
            tCrB = cute.make_tensor(values, cute.make_layout(((2, 2), 1, 2)))
            for half in cutlass.range_constexpr(2):
                tCrC_j = cute.make_tensor(
                    tCrC[None, None, j].iterator, cute.make_layout(((2, 2), SLOTS // 2, 1))
                )
                tCrB_j = tCrB[None, None, half]
                cute.gemm(mma_atom, tCrC_j, tCrA[None, None, half], tCrB_j, tCrC_j)

    def chunk_vec(self, chunk: Int32, quad_lane: Int32) -> Int32:
        """Vector of x, within a step, that a lane's chunk of codes meets."""
        return quad_lane * 2 + (chunk // 2 * (STEP_VECS // 2) + chunk % 2)

    def chunk_words(self, rCodes: cute.Tensor, chunk: int) -> tuple[Uint32, Uint32]:
        """The 8 codes of a slot's chunk."""
        first = chunk % 2 * 2
        return rCodes[first, chunk // 2], rCodes[first + 1, chunk // 2]

    def scale_code(self, word: Uint32, half, place: Place) -> Uint32:
        """Of a slot's word of 4 scales, the one of the first (0) or last (1) two chunks."""
        column = place.quad_lane // 2 + 2 * half
        return word >> (column * 8).to(Uint32) & Uint32(0xFF)

    def factors(self, word: Uint32, place: Place) -> tuple[Uint32, Uint32]:
        """What makes a slot's patterns weights, for the first and for the last two chunks."""
        first, second = (
            e8m0_pattern_factor(self.scale_code(word, half, place), E4M3_EXPONENT)
            for half in range(2)
        )
        return first, second

    def is_special(self, rCodes: cute.Tensor, rScales: cute.Tensor) -> Boolean:
        """True where a factor is not all of a scale, or a code may be NaN."""
        carry = Uint32((E4M3_EXPONENT + 1) * 0x01010101)
        found = Uint32(0)
        for s in range(SLOTS):
            found |= ((rScales[s] & Uint32(0x7F7F7F7F)) + carry) & rScales[s]
        for i in range(cute.size(rCodes)):
            found |= e4m3_nan_bits(rCodes[i])
        return found & Uint32(EVERY_SIGN) != 0

    # Sums.

    def part_offset(self, group: Int32, warp: Int32, token: Int32, row) -> Int32:
        """Place of a sum."""
        cfg = self.config
        return ((group + warp) * cfg.tokens + token) * cfg.part_pitch + row

    @cute.jit
    def stage_sums(
        self, tCrC: cute.Tensor, sPart: cute.Tensor, group: Int32, turn: Int32, place: Place
    ):
        """This warp's sums, rows of one token side by side: 8 neighbours of each slot."""
        cfg = self.config
        for j in cutlass.range_constexpr(cfg.tokens // MMA_N):
            for e in cutlass.range_constexpr(2):
                token = j * MMA_N + place.quad_lane * 2 + e
                offset = self.part_offset(group, place.warp, token, place.lane // 4)
                for s in cutlass.range_constexpr(SLOTS):
                    value = tCrC[(e, s % 2), s // 2, j]
                    if const_expr(cfg.turns > 1):
                        value += sPart[offset + s * NEIGHBOURS] if turn > 0 else Float32(0.0)
                    sPart[offset + s * NEIGHBOURS] = value

    @cute.jit
    def finish(self, operands: Operands, sPart: cute.Tensor, place: Place):
        """Adds the sums of all CTAs and warps, in order, and stores this CTA's part."""
        cfg = self.config
        m = operands.mY.shape[0]
        token_vecs = cfg.groups * GROUP_ROWS // STORE
        tokens = cutlass.min(m - place.first_token, cfg.tokens)
        first = place.rank * cfg.threads + place.tidx
        for i in cutlass.range(first, tokens * token_vecs, cfg.splits * cfg.threads, unroll=1):
            token, vec = i // token_vecs, i % token_vecs
            group, row = vec // (GROUP_ROWS // STORE), vec % (GROUP_ROWS // STORE) * STORE
            first_warp = cfg.warp_of(group * cfg.turn_steps)
            last_warp = cfg.warp_of(group * cfg.turn_steps + (cfg.turn_steps - 1))
            rSum = cute.make_rmem_tensor(STORE, Float32)
            rSum.fill(0.0)
            for r in cutlass.range_constexpr(cfg.splits):
                for w in cutlass.range_constexpr(cfg.pieces):
                    warp_k = cutlass.min(first_warp + w, last_warp)
                    place_of_sum = self.part_offset(group, warp_k, token, row)
                    rPart = load_sums(sPart, place_of_sum, r, cfg.splits)
                    for e in cutlass.range_constexpr(STORE):
                        rSum[e] += rPart[e] if first_warp + w <= last_warp else Float32(0.0)
            rows = Rows(place.cluster * cfg.groups + group, Int32(0))
            column = rows.row(row // NEIGHBOURS) + row % NEIGHBOURS
            store_outputs(operands, rSum, place.first_token + token, column)


def both_patterns(words: tuple[Uint32, Uint32]) -> tuple[Uint32, ...]:
    """4 pairs of 8 codes, the first two for one product, the last two for the next."""
    return (*e4m3_patterns(words[0]), *e4m3_patterns(words[1]))


@cute.jit
def weight_fragments(rW: cute.Tensor) -> cute.Tensor:
    """``((2, 2, 2), m16, half)`` of 8 weights of 4 slots, ``(WORD, SLOT)``."""
    rA = cute.make_rmem_tensor(((2, 2), SLOTS // 2, 2), Uint32)
    for half in cutlass.range_constexpr(2):
        for s in cutlass.range_constexpr(SLOTS):
            for pair in cutlass.range_constexpr(2):
                rA[(s % 2, pair), s // 2, half] = rW[2 * half + pair, s]
    values = cute.recast_ptr(rA.iterator, dtype=BFloat16)
    return cute.make_tensor(values, cute.make_layout(((2, 2, 2), SLOTS // 2, 2)))
