# SPDX-License-Identifier: Apache-2.0
"""Matrix product of a few activations with block-scaled weights (sm_80 and newer).

    W[n, k] = B(code[n, k] * scale[n, k // block_size])     B rounds to BF16; exact but at its ends
    acc[m, n] = sum_k f32(x[m, k]) * f32(W[n, k])           FP32
    y[m, n] = B(alpha * acc[m, n])

Weights are read once, so this is bound by memory. They go to shared memory in 16-byte cp.async, in
a ring that belongs to each thread alone, and become BF16 in its registers. They are the 16-row side
of mma.sync m16n8k16, x the 8-column side.

Grid:          (row tiles x CTAs of a cluster, tiles of tokens). The CTAs of a cluster share K
               (sm_90 and newer), and so do the warps of a CTA.
Warps:         ``warps_n`` along N x ``warps_k`` along K. A warp has 32 weight rows: 8 neighbours, 4
               times 32 rows apart, whose scales are 16 neighbouring bytes of the blob for 4 blocks
               of K.
K:             a warp takes 128 elements at a time. A lane's 16-byte load is one operand of several
               products, so the order of K inside of them is the codes', not memory's; fragments of
               x are brought into the same order in registers.
Pipeline:      x of ``staged_steps`` steps, then ``depth`` steps of codes and scales are on the way
               at once. A thread reads what it asked for itself: it waits for its own copies, and
               the only barriers are those around x, one pair each time that it is filled.
Shared memory: rows of x, whose 16-byte columns are XOR-ed so that 8 lanes meet 8 bank groups, and
               the ring, ``(depth, vector, thread)`` of 16 bytes; then, in their place, the FP32
               sums of every warp along K.
Sums:          in the order of warps, then of CTAs, whatever comes first: the bits are the same in
               every run. CTAs of a cluster read each other's, and each stores a part.
Edges:         rows past N, K past its end and padding of the blob are not read.
Overlap:       with PDL the next grid may start at once. Before the wait, weights and scales are
               asked into L2, where they are coherent; all else of memory is touched after it.
Requires:      K a multiple of 32, N of 8; 16-byte aligned rows of x, codes and y; B * S up to
               2**31 - 2**16 rows.
Source:        written for this project; scale blobs after the F8_128x4 layout of cudnn-frontend. No
               code copied.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from cudnn_blocks.stages.dequant_gemm.portable_config import (
    BLOB_TILE,
    MMA_N,
    SLOTS,
    STEP,
    VECTOR_BYTES,
    WARP_ROWS,
    WARP_THREADS,
    DecodeKernelConfig,
    smem_bytes,
    x_bytes,
)
from cudnn_blocks.stages.device.cp_async import cp_async_16_or_zero
from cudnn_blocks.stages.device.packed_codes import (
    E2M1_ORDER,
    E4M3_ORDER,
    TWO_TO_126,
    e2m1_patterns,
    e4m3_to_bf16,
    e4m3_to_bf16x2,
    e8m0_to_bf16x2,
    multiply_bf16x2,
    saturate_bf16x2,
)
from cudnn_blocks.stages.device.prefetch import prefetch_l2_line
from cudnn_blocks.stages.gemm.portable_operands import rows_of

VEC = 8  # elements of a 16-byte vector of x
WORDS = 4  # 32-bit words of a vector
CHUNKS = 4  # vectors of x, of 8 elements each, that a lane's codes of a row and step meet
STEP_VECS = STEP // VEC
QUAD_BYTES = 64  # of a load by the 4 lanes of a row
BLOB_ROWS, BLOB_COLUMNS = 32, 4
NEIGHBOURS = 8  # weight rows
MMA_M, MMA_K = 16, 16
STORE = 4  # neighbouring outputs of a thread

TWO_TO_118 = 0x7A807A80
"""Makes e4m3 scales fit e2m1 patterns, times 2**-126: their products are 2**-8 of the weights."""
PATTERN_SCALE = 2.0**8
FIRST_LARGE = {True: 253, False: 247}
"""E8M0 codes that can make an e2m1 code (True) or an e4m3 code larger than BF16 holds."""
EVERY_SIGN = 0x80808080
"""The highest bit of every byte."""


@dataclass(frozen=True)
class Operands:
    """Everything in global memory."""

    mX: cute.Tensor
    """(M, K)"""
    mW: cute.Tensor
    """(N, BYTES): codes."""
    mSF: cute.Tensor
    """Bytes of the scale blob."""
    mY: cute.Tensor
    """(M, N)"""
    alpha: Float32


@dataclass(frozen=True)
class Place:
    """Where a thread is."""

    tidx: Int32
    tile: Int32
    """Row tile."""
    rank: Int32
    """CTA within the cluster."""
    first_token: Int32
    warps_n: int

    @property
    def lane(self) -> Int32:
        """Within the warp."""
        return self.tidx % WARP_THREADS

    @property
    def quad_lane(self) -> Int32:
        """Within the 4 lanes that share a weight row."""
        return self.tidx % 4

    @property
    def warp_n(self) -> Int32:
        """Place along N."""
        return self.tidx // WARP_THREADS % self.warps_n

    @property
    def warp_k(self) -> Int32:
        """Place along K."""
        return self.tidx // WARP_THREADS // self.warps_n

    def group(self, warp_n) -> Int32:
        """Which 32 weight rows a warp of the CTA has, over all of them."""
        return self.tile * self.warps_n + warp_n

    @property
    def blob_tile(self) -> Int32:
        """Row tile of the blob."""
        return self.group(self.warp_n) // SLOTS

    @property
    def blob_row(self) -> Int32:
        """The first of the thread's 4 weight rows, within the blob's tile."""
        return self.group(self.warp_n) % SLOTS * NEIGHBOURS + self.lane // 4

    def row(self, slot) -> Int32:
        """A weight row of the thread."""
        return self.blob_tile * BLOB_TILE + self.blob_row + slot * BLOB_ROWS


class DecodeKernel:
    """The product; see the module docstring."""

    def __init__(self, config: DecodeKernelConfig):
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
            grid=(cfg.row_tiles(n) * cfg.splits, (m - 1) // cfg.tokens + 1, 1),
            block=(cfg.threads, 1, 1),
            cluster=(cfg.splits, 1, 1) if cfg.splits > 1 else None,
            stream=stream,
            min_blocks_per_mp=cfg.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=cfg.use_pdl,
        )

    @cute.kernel
    def kernel(self, operands: Operands):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, token_tile, _ = cute.arch.block_idx()
        place = Place(
            tidx, bidx // cfg.splits, bidx % cfg.splits, token_tile * cfg.tokens, cfg.warps_n
        )
        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            self.prefetch(operands, place)
            cute.arch.griddepcontrol_wait()
        smem = SmemAllocator()
        sPart = smem.allocate_tensor(
            Float32, cute.make_layout(smem_bytes(cfg) // 4), byte_alignment=128
        )
        words = cute.recast_ptr(sPart.iterator, dtype=Uint32)
        sX = cute.make_tensor(words, cute.make_layout(x_bytes(cfg) // 4))
        ring = words + x_bytes(cfg) // 4
        sCodes = cute.make_tensor(ring, cute.make_layout((smem_bytes(cfg) - x_bytes(cfg)) // 4))
        tCrC = self.make_accumulators()
        self.accumulate(operands, tCrC, sX, sCodes, place)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.stage_sums(tCrC, sPart, place)
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

    def make_accumulators(self) -> cute.Tensor:
        """``((2, 2), m16, n8)`` of a thread: 32 weight rows by the CTA's tokens."""
        layout = cute.make_layout(((2, 2), SLOTS // 2, self.config.tokens // MMA_N))
        tCrC = cute.make_rmem_tensor(layout, Float32)
        tCrC.fill(0.0)
        return tCrC

    @cute.jit
    def accumulate(
        self,
        operands: Operands,
        tCrC: cute.Tensor,
        sX: cute.Tensor,
        sCodes: cute.Tensor,
        place: Place,
    ):
        """Adds this warp's products."""
        cfg = self.config
        first, last = self.steps(operands, place)
        rCodes = cute.make_rmem_tensor((WORDS, cfg.loads, SLOTS), Uint32)
        rScales = cute.make_rmem_tensor(SLOTS, Uint32)
        self.fetch_x(operands, sX, first, place)
        for i in cutlass.range(cfg.depth, unroll=1):
            step = first + place.warp_k + i * cfg.warps_k
            self.fetch(operands, sCodes, i, step, last, place)
        slot = Int32(0)
        for staged in cutlass.range(first, last, cfg.staged_steps, unroll=1):
            if staged == first:
                cute.arch.cp_async_wait_group(cfg.depth)
            else:
                cute.arch.sync_threads()
                self.fetch_x(operands, sX, staged, place)
                cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            end = cutlass.min(staged + cfg.staged_steps, last)
            for step in cutlass.range(staged + place.warp_k, end, cfg.warps_k, unroll=1):
                cute.arch.cp_async_wait_group(cfg.depth - 1)
                self.collect(operands, sCodes, rCodes, rScales, slot, step, place)
                self.multiply(tCrC, rCodes, rScales, sX, step - staged, place)
                following = step + cfg.depth * cfg.warps_k
                self.fetch(operands, sCodes, slot, following, last, place)
                slot = slot + 1 if slot + 1 < cfg.depth else Int32(0)

    def steps(self, operands: Operands, place: Place):
        """The first step of this CTA, and the one past its last."""
        num_steps = (operands.mX.shape[1] - 1) // STEP + 1
        share = (num_steps - 1) // self.config.splits + 1
        first = place.rank * share
        return first, cutlass.min(first + share, num_steps)

    @cute.jit
    def prefetch(self, operands: Operands, place: Place):
        """Asks for this warp's first weights, a row by every lane, and for their scales."""
        cfg = self.config
        n, row_bytes = operands.mW.shape
        first, last = self.steps(operands, place)
        neighbour, slot = place.lane % NEIGHBOURS, place.lane // NEIGHBOURS
        row = place.row(slot) - place.lane // 4 + neighbour
        row_offset = Int64(row) * operands.mW.stride[0]
        for i in cutlass.range(cfg.depth, unroll=1):
            step = first + place.warp_k + i * cfg.warps_k
            byte = step * (STEP // cfg.codes_per_byte)
            if (step < last) & (byte < row_bytes) & (row < n):
                prefetch_l2_line(operands.mW.iterator + (row_offset + byte))
            # Those of 8 neighbours and a column of the blob's tiles fill a line.
            has_scales = self.first_byte(step, 0, place) < row_bytes
            if (step < last) & (place.lane < 4) & has_scales:
                prefetch_l2_line(operands.mSF.iterator + self.scale_offset(operands, step, place))

    @cute.jit
    def fetch(
        self,
        operands: Operands,
        sCodes: cute.Tensor,
        slot: Int32,
        step: Int32,
        last: Int32,
        place: Place,
    ):
        """Starts this thread's codes and scales of a step on their way; zeros outside."""
        cfg = self.config
        n, row_bytes = operands.mW.shape
        for i in cutlass.range_constexpr(cfg.loads):
            byte = self.first_byte(step, i, place)
            is_inside = (step < last) & (byte < row_bytes)
            for s in cutlass.range_constexpr(SLOTS):
                row = place.row(s)
                offset = Int64(row) * operands.mW.stride[0] + byte
                cp_async_16_or_zero(
                    sCodes.iterator + self.ring_offset(slot, i * SLOTS + s, place),
                    operands.mW.iterator + cute.assume(offset, divby=VECTOR_BYTES),
                    is_inside & (row < n),
                )
            if const_expr(i == 0):
                cp_async_16_or_zero(
                    sCodes.iterator + self.ring_offset(slot, cfg.loads * SLOTS, place),
                    operands.mSF.iterator + self.scale_offset(operands, step, place),
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
        step: Int32,
        place: Place,
    ):
        """Codes ``(WORD, LOAD, SLOT)`` and scale words ``(SLOT)`` of a step that has arrived."""
        cfg = self.config
        for i in cutlass.range_constexpr(cfg.loads):
            for s in cutlass.range_constexpr(SLOTS):
                offset = self.ring_offset(slot, i * SLOTS + s, place)
                cute.autovec_copy(words_view(sCodes, offset), rCodes[None, i, s])
        offset = self.ring_offset(slot, cfg.loads * SLOTS, place)
        cute.autovec_copy(words_view(sCodes, offset), rScales)
        if const_expr(cfg.loads > 1):
            # Padding may be NaN, of which zeros times NaN would make more.
            byte = self.first_byte(step, cfg.loads - 1, place)
            is_inside = byte < operands.mW.shape[1]
            for s in cutlass.range_constexpr(SLOTS):
                rScales[s] = rScales[s] if is_inside else rScales[s] & Uint32(0xFFFF)

    def first_byte(self, step: Int32, load: int, place: Place) -> Int32:
        """Place of a load in its row of codes."""
        row_bytes = STEP // self.config.codes_per_byte
        return step * row_bytes + load * QUAD_BYTES + place.quad_lane * VECTOR_BYTES

    def ring_offset(self, slot: Int32, vector: int, place: Place) -> Int32:
        """Word offset of this thread's vector."""
        cfg = self.config
        return ((slot * cfg.vectors + vector) * cfg.threads + place.tidx) * WORDS

    def scale_offset(self, operands: Operands, step: Int32, place: Place) -> Int64:
        """Place in the blob of 4 scales for each of this thread's rows."""
        cfg = self.config
        blocks = operands.mX.shape[1] // cfg.block_size
        blob_columns = (blocks - 1) // BLOB_COLUMNS + 1
        column = step
        if not cfg.is_mx:
            column = step * 2 + place.quad_lane // 2
        tile = Int64(place.blob_tile) * blob_columns + column
        offset = (tile * BLOB_ROWS + place.blob_row) * (SLOTS * BLOB_COLUMNS)
        return cute.assume(offset, divby=VECTOR_BYTES)

    @cute.jit
    def fetch_x(self, operands: Operands, sX: cute.Tensor, staged: Int32, place: Place):
        """Starts x of ``staged_steps`` steps on its way, a row by a warp; zeros past the edges."""
        cfg = self.config
        m, k = operands.mX.shape
        warps = cfg.threads // WARP_THREADS
        vecs = cfg.staged_steps * STEP_VECS
        for token in cutlass.range(place.tidx // WARP_THREADS, cfg.tokens, warps, unroll=1):
            row = place.first_token + token
            row_offset = Int64(row) * operands.mX.stride[0]
            for i in cutlass.range_constexpr((vecs - 1) // WARP_THREADS + 1):
                vec = place.lane + i * WARP_THREADS
                column = staged * STEP + vec * VEC
                if const_expr((i + 1) * WARP_THREADS <= vecs) or vec < vecs:
                    cp_async_16_or_zero(
                        sX.iterator + self.vec_offset(token, vec),
                        operands.mX.iterator + cute.assume(row_offset + column, divby=VEC),
                        (row < m) & (column < k),
                    )
        cute.arch.cp_async_commit_group()

    def ordered(self, rX: cute.Tensor) -> cute.Tensor:
        """A vector of x in the order of its codes."""
        cfg = self.config
        order = E2M1_ORDER
        if not cfg.is_fp4:
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
        return token * (self.config.staged_steps * STEP_VECS * WORDS) + swizzled * WORDS

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
        """A step's products, 8 elements of K of every lane at a time."""
        cfg = self.config
        saturates = Boolean(False)
        if const_expr(cfg.is_mx):
            saturates = cute.arch.vote_any_sync(self.has_large_scale(rScales))
        op = warp.MmaF16BF16Op(BFloat16, Float32, (MMA_M, MMA_N, MMA_K))
        mma_atom = cute.make_mma_atom(op)
        factors = self.scale_factors(rScales, place)
        rW = cute.make_rmem_tensor((WORDS, SLOTS), Uint32)
        for c in cutlass.range_constexpr(CHUNKS):
            for s in cutlass.range_constexpr(SLOTS):
                self.dequantize(rW[None, s], rCodes[None, None, s], factors[s], c)
            if const_expr(cfg.is_mx):
                if saturates:
                    for i in cutlass.range_constexpr(cute.size(rW)):
                        rW[i] = saturate_bf16x2(rW[i])
            tCrA = weight_fragments(rW)
            vec = step * STEP_VECS + self.chunk_vec(c, place.quad_lane)
            for j in cutlass.range_constexpr(cfg.tokens // MMA_N):
                rX = cute.make_rmem_tensor(WORDS, Uint32)
                token = j * MMA_N + place.lane // 4
                cute.autovec_copy(words_view(sX, self.vec_offset(token, vec)), rX)
                values = cute.recast_ptr(self.ordered(rX).iterator, dtype=BFloat16)
                tCrB = cute.make_tensor(values, cute.make_layout(((2, 2), 1, 2)))
                for half in cutlass.range_constexpr(2):
                    tCrC_j = cute.make_tensor(
                        tCrC[None, None, j].iterator, cute.make_layout(((2, 2), SLOTS // 2, 1))
                    )
                    tCrB_j = tCrB[None, None, half]
                    cute.gemm(mma_atom, tCrC_j, tCrA[None, None, half], tCrB_j, tCrC_j)

    def chunk_vec(self, chunk: int, quad_lane: Int32) -> Int32:
        """Vector of x, within a step, that a lane's chunk of codes meets."""
        if self.config.is_fp4:
            return quad_lane * CHUNKS + chunk
        return quad_lane * 2 + (chunk // 2 * (STEP_VECS // 2) + chunk % 2)

    @cute.jit
    def scale_factors(self, rScales: cute.Tensor, place: Place):
        """Per slot, the factor pairs of the first and of the last two chunks."""
        cfg = self.config
        factors = []
        for s in cutlass.range_constexpr(SLOTS):
            pair = []
            for half in cutlass.range_constexpr(2):
                if const_expr(not cfg.is_mx):
                    column = place.quad_lane % 2 * 2 + half
                elif const_expr(cfg.is_fp4):
                    column = place.quad_lane
                else:
                    column = place.quad_lane // 2 + 2 * half
                code = rScales[s] >> (column * 8).to(Uint32) & Uint32(0xFF)
                if const_expr(cfg.is_mx):
                    pair.append(e8m0_to_bf16x2(code))
                else:
                    pair.append(multiply_bf16x2(e4m3_to_bf16x2(code), Uint32(TWO_TO_118)))
            factors.append(tuple(pair))
        return tuple(factors)

    def has_large_scale(self, rScales: cute.Tensor) -> Boolean:
        """True where an E8M0 code is at least ``FIRST_LARGE``."""
        carry = Uint32((256 - FIRST_LARGE[self.config.is_fp4]) * 0x01010101)
        found = Uint32(0)
        for s in range(SLOTS):
            found |= ((rScales[s] & Uint32(0x7F7F7F7F)) + carry) & rScales[s]
        return found & Uint32(EVERY_SIGN) != 0

    @cute.jit
    def dequantize(self, rW, rCodes, factors, chunk: cutlass.Constexpr[int]):
        """8 weights of a row: 4 pairs, the first two for one product, the last two for the next."""
        cfg = self.config
        factor = factors[chunk // 2]
        if const_expr(cfg.is_fp4):
            patterns = e2m1_patterns(rCodes[chunk, 0])
            for i in cutlass.range_constexpr(WORDS):
                value = patterns[i]
                if const_expr(cfg.is_mx):
                    value = multiply_bf16x2(value, Uint32(TWO_TO_126))
                rW[i] = multiply_bf16x2(value, factor)
        else:
            codes = cute.make_tensor(
                rCodes[None, chunk // 2].iterator + chunk % 2 * 2, cute.make_layout(2)
            )
            e4m3_to_bf16(codes, rW)
            for i in cutlass.range_constexpr(WORDS):
                rW[i] = multiply_bf16x2(rW[i], factor)

    # Sums.

    @cute.jit
    def stage_sums(self, tCrC: cute.Tensor, sPart: cute.Tensor, place: Place):
        """This warp's sums, rows of one token side by side: 8 neighbours of each slot."""
        cfg = self.config
        for j in cutlass.range_constexpr(cfg.tokens // MMA_N):
            for e in cutlass.range_constexpr(2):
                token = place.warp_k * cfg.tokens + j * MMA_N + place.quad_lane * 2 + e
                for s in cutlass.range_constexpr(SLOTS):
                    row = place.warp_n * WARP_ROWS + s * NEIGHBOURS + place.lane // 4
                    sPart[token * cfg.part_pitch + row] = tCrC[(e, s % 2), s // 2, j]

    @cute.jit
    def finish(self, operands: Operands, sPart: cute.Tensor, place: Place):
        """Adds the sums of all warps along K, in order, and stores this CTA's part."""
        cfg = self.config
        m, n = operands.mY.shape
        token_vecs = cfg.rows // STORE
        first = place.rank * cfg.threads + place.tidx
        alpha = operands.alpha
        if const_expr(not cfg.is_mx):
            alpha = alpha * Float32(PATTERN_SCALE)
        for i in cutlass.range(first, cfg.tokens * token_vecs, cfg.splits * cfg.threads, unroll=4):
            token, row = i // token_vecs, i % token_vecs * STORE
            rSum = cute.make_rmem_tensor(STORE, Float32)
            rSum.fill(0.0)
            for r in cutlass.range_constexpr(cfg.splits):
                for w in cutlass.range_constexpr(cfg.warps_k):
                    place_of_sum = (w * cfg.tokens + token) * cfg.part_pitch + row
                    ptr = sPart.iterator + cute.assume(place_of_sum, divby=STORE)
                    if const_expr(cfg.splits > 1):
                        ptr = cute.arch.map_dsmem_ptr(ptr, Int32(r))
                    rPart = cute.make_rmem_tensor(STORE, Float32)
                    cute.autovec_copy(cute.make_tensor(ptr, cute.make_layout(STORE)), rPart)
                    rSum.store(rSum.load() + rPart.load())
            group, slot = place.group(row // WARP_ROWS), row % WARP_ROWS // NEIGHBOURS
            column = (group // SLOTS) * BLOB_TILE + slot * BLOB_ROWS
            column += group % SLOTS * NEIGHBOURS + row % NEIGHBOURS
            y_row = place.first_token + token
            if (y_row < m) & (column < n):
                rY = cute.make_rmem_tensor(STORE, BFloat16)
                rY.store((rSum.load() * alpha).to(BFloat16))
                offset = Int64(y_row) * operands.mY.stride[0] + column
                y_ptr = operands.mY.iterator + cute.assume(offset, divby=STORE)
                cute.autovec_copy(rY, cute.make_tensor(y_ptr, cute.make_layout(STORE)))


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


def words_view(sX: cute.Tensor, offset) -> cute.Tensor:
    """A vector of 4 words from an offset on."""
    iterator = sX.iterator + cute.assume(offset, divby=WORDS)
    return cute.make_tensor(iterator, cute.make_layout(WORDS))


def fake_operands(config: DecodeKernelConfig) -> tuple:
    """Fake tensors in ``__call__`` order, without the stream; every extent is dynamic."""
    b, s, n = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=VEC)
    k = cute.sym_int(divisibility=32)

    def fake(dtype, *shape, multiple=VEC):
        stride = (*(cute.sym_int64(divisibility=multiple) for _ in shape[1:]), 1)
        return make_fake_tensor(dtype, shape, stride, assumed_align=16)

    return (
        fake(BFloat16, b, s, k),
        fake(Uint8, n, cute.sym_int(divisibility=16), multiple=16),
        fake(Uint8, cute.sym_int(divisibility=16)),
        fake(BFloat16, b, s, n),
        Float32(1.0),
    )
