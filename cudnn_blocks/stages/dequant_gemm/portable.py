# SPDX-License-Identifier: Apache-2.0
"""Matrix product of a few activations with block-scaled weights (sm_80 and newer).

    W[n, k] = B(code[n, k] * scale[n, k // block_size])     B rounds to BF16; exact but at its ends
    acc[m, n] = sum_k f32(x[m, k]) * f32(W[n, k])           FP32
    y[m, n] = B(alpha * acc[m, n])

Weights are read once, so this is bound by memory: they go from there to registers in 16-byte loads
and become BF16 there. They are the 16-row side of mma.sync m16n8k16, x the 8-column side.

Grid:          (row tiles of 128 x CTAs of a cluster, tiles of tokens). The CTAs of a cluster share
               K (sm_90 and newer), and so do the warps of a CTA.
Warps:         4 along N x ``warps_k`` along K. A warp has 32 weight rows: 8 neighbours, 4 times 32
               rows apart, whose scales are 16 neighbouring bytes of the blob for 4 blocks of K.
K:             a warp takes 128 elements at a time. A lane's 16-byte load is one operand of several
               products, so the order of K inside of them is the codes', not memory's; x is staged
               in the same order.
Pipeline:      two steps of a warp's codes and scales in registers; x of ``staged_steps`` steps in
               shared memory, one pair of barriers each time that it is filled.
Shared memory: rows of x, whose 16-byte columns are XOR-ed so that 8 lanes meet 8 bank groups; then,
               in their place, the FP32 sums of every warp along K.
Sums:          in the order of warps, then of CTAs, whatever comes first: the bits are the same in
               every run. CTAs of a cluster read each other's, and each stores a part.
Edges:         rows past N, K past its end and padding of the blob are not read.
Overlap:       with PDL the next grid may start at once; all memory is touched after the wait.
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
    MMA_N,
    PART_PITCH,
    PREFETCH,
    ROWS,
    SLOTS,
    STEP,
    WARP_THREADS,
    WARPS_N,
    DecodeKernelConfig,
    shared_bytes,
)
from cudnn_blocks.stages.device.control import cta_or
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
from cudnn_blocks.stages.gemm.portable_operands import rows_of

VEC = 8  # elements of a 16-byte vector of x
VECTOR_BITS = 128
WORDS = 4  # 32-bit words of a vector
CHUNKS = 4  # vectors of x, of 8 elements each, that a lane's codes of a row and step meet
STEP_VECS = STEP // VEC
QUAD_BYTES = 64  # of a load by the 4 lanes of a row
BLOB_ROWS, BLOB_COLUMNS = 32, 4
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
        return self.tidx // WARP_THREADS % WARPS_N

    @property
    def warp_k(self) -> Int32:
        """Place along K."""
        return self.tidx // WARP_THREADS // WARPS_N

    @property
    def blob_row(self) -> Int32:
        """The first of the thread's 4 weight rows, within the tile."""
        return self.warp_n * 8 + self.lane // 4


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
            grid=(((n - 1) // ROWS + 1) * cfg.splits, (m - 1) // cfg.tokens + 1, 1),
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
        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        place = Place(tidx, bidx // cfg.splits, bidx % cfg.splits, token_tile * cfg.tokens)
        smem = SmemAllocator()
        sPart = smem.allocate_tensor(
            Float32, cute.make_layout(shared_bytes(cfg) // 4), byte_alignment=128
        )
        sX = cute.make_tensor(
            cute.recast_ptr(sPart.iterator, dtype=Uint32), cute.make_layout(shared_bytes(cfg) // 4)
        )
        sBits = smem.allocate_tensor(
            Uint32, cute.make_layout(cfg.threads // WARP_THREADS), byte_alignment=4
        )
        tCrC = self.make_accumulators()
        needs_care = self.accumulate(operands, tCrC, sX, place, False)
        cute.arch.sync_threads()
        if const_expr(cfg.is_mx):
            if cta_or(needs_care & Uint32(EVERY_SIGN), sBits) != 0:
                tCrC.fill(0.0)
                self.accumulate(operands, tCrC, sX, place, True)
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
        place: Place,
        saturates: cutlass.Constexpr[bool],
    ) -> Uint32:
        """Adds this warp's products.

        Weights beyond BF16's range saturate if ``saturates``. Otherwise the result has a bit of
        ``EVERY_SIGN`` if a scale is so large that one may be there, and the sums are to be redone.
        """
        cfg = self.config
        num_steps = (operands.mX.shape[1] - 1) // STEP + 1
        share = (num_steps - 1) // cfg.splits + 1
        first = place.rank * share
        last = cutlass.min(first + share, num_steps)
        rCodes, rNext = (
            cute.make_rmem_tensor((WORDS, cfg.loads, SLOTS), Uint32) for _ in range(PREFETCH)
        )
        rScales, rNextScales = (cute.make_rmem_tensor(SLOTS, Uint32) for _ in range(PREFETCH))
        step = first + place.warp_k
        self.load(operands, rCodes, rScales, step, last, place)
        self.load(operands, rNext, rNextScales, step + cfg.warps_k, last, place)
        large = Uint32(0)
        for staged in cutlass.range(first, last, cfg.staged_steps, unroll=1):
            if staged > first:
                cute.arch.sync_threads()
            self.stage_x(operands, sX, staged, place)
            cute.arch.sync_threads()
            end = cutlass.min(staged + cfg.staged_steps, last)
            for step in cutlass.range(staged + place.warp_k, end, cfg.warps_k, unroll=1):
                large |= self.large_scales(rScales)
                self.multiply(tCrC, rCodes, rScales, sX, step - staged, place, saturates)
                rCodes.store(rNext.load())
                rScales.store(rNextScales.load())
                self.load(operands, rNext, rNextScales, step + 2 * cfg.warps_k, last, place)
        return large

    @cute.jit
    def load(self, operands: Operands, rCodes, rScales, step: Int32, last: Int32, place: Place):
        """Codes ``(WORD, LOAD, SLOT)`` and scale words ``(SLOT)`` of a step; zeros outside."""
        cfg = self.config
        n, row_bytes = operands.mW.shape
        is_inside = Boolean(False)
        for i in cutlass.range_constexpr(cfg.loads):
            byte = step * (STEP // cfg.codes_per_byte) + i * QUAD_BYTES + place.quad_lane * 16
            is_inside = (step < last) & (byte < row_bytes)
            for s in cutlass.range_constexpr(SLOTS):
                row = place.tile * ROWS + place.blob_row + s * BLOB_ROWS
                offset = Int64(row) * operands.mW.stride[0] + byte
                load_words(rCodes[None, i, s], operands.mW, offset, is_inside & (row < n))
            if const_expr(i == 0):
                self.load_scales(operands, rScales, step, is_inside, place)
        if const_expr(cfg.loads > 1):
            # Padding may be NaN, of which zeros times NaN would make more.
            for s in cutlass.range_constexpr(SLOTS):
                rScales[s] = rScales[s] if is_inside else rScales[s] & Uint32(0xFFFF)

    @cute.jit
    def load_scales(
        self,
        operands: Operands,
        rScales: cute.Tensor,
        step: Int32,
        is_inside: Boolean,
        place: Place,
    ):
        """A word of 4 scales for each slot, or zeros where this lane has no codes."""
        cfg = self.config
        blocks = operands.mX.shape[1] // cfg.block_size
        blob_columns = (blocks - 1) // BLOB_COLUMNS + 1
        column = step
        if const_expr(not cfg.is_mx):
            column = step * 2 + place.quad_lane // 2
        tile = Int64(place.tile) * blob_columns + column
        offset = (tile * BLOB_ROWS + place.blob_row) * (SLOTS * BLOB_COLUMNS)
        load_words(rScales, operands.mSF, offset, is_inside)

    @cute.jit
    def stage_x(self, operands: Operands, sX: cute.Tensor, staged: Int32, place: Place):
        """Stages x of ``staged_steps`` steps, in the order of the codes; zeros past the edges."""
        cfg = self.config
        m, k = operands.mX.shape
        vecs = cfg.staged_steps * STEP_VECS
        for i in cutlass.range(place.tidx, cfg.tokens * vecs, cfg.threads, unroll=4):
            token, vec = i // vecs, i % vecs
            row, column = place.first_token + token, staged * STEP + vec * VEC
            rX = cute.make_rmem_tensor(WORDS, Uint32)
            offset = Int64(row) * operands.mX.stride[0] + column
            load_words(rX, operands.mX, offset, (row < m) & (column < k))
            rOrdered = self.ordered(rX)
            cute.autovec_copy(rOrdered, words_view(sX, self.vec_offset(token, vec)))

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
        saturates: cutlass.Constexpr[bool],
    ):
        """A step's products, 8 elements of K of every lane at a time."""
        cfg = self.config
        op = warp.MmaF16BF16Op(BFloat16, Float32, (MMA_M, MMA_N, MMA_K))
        mma_atom = cute.make_mma_atom(op)
        factors = self.scale_factors(rScales, place)
        rW = cute.make_rmem_tensor((WORDS, SLOTS), Uint32)
        for c in cutlass.range_constexpr(CHUNKS):
            for s in cutlass.range_constexpr(SLOTS):
                self.dequantize(rW[None, s], rCodes[None, None, s], factors[s], c)
            if const_expr(saturates):
                for i in cutlass.range_constexpr(cute.size(rW)):
                    rW[i] = saturate_bf16x2(rW[i])
            tCrA = weight_fragments(rW)
            vec = step * STEP_VECS + self.chunk_vec(c, place.quad_lane)
            for j in cutlass.range_constexpr(cfg.tokens // MMA_N):
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

    @cute.jit
    def large_scales(self, rScales: cute.Tensor) -> Uint32:
        """Bits of ``EVERY_SIGN`` for E8M0 codes from ``FIRST_LARGE`` on; others mean nothing."""
        found = Uint32(0)
        if const_expr(self.config.is_mx):
            carry = Uint32((256 - FIRST_LARGE[self.config.is_fp4]) * 0x01010101)
            for s in cutlass.range_constexpr(SLOTS):
                found |= ((rScales[s] & Uint32(0x7F7F7F7F)) + carry) & rScales[s]
        return found

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
        """This warp's sums, rows of one token side by side."""
        cfg = self.config
        for j in cutlass.range_constexpr(cfg.tokens // MMA_N):
            for e in cutlass.range_constexpr(2):
                token = place.warp_k * cfg.tokens + j * MMA_N + place.quad_lane * 2 + e
                for s in cutlass.range_constexpr(SLOTS):
                    row = place.blob_row + s * BLOB_ROWS
                    sPart[token * PART_PITCH + row] = tCrC[(e, s % 2), s // 2, j]

    @cute.jit
    def finish(self, operands: Operands, sPart: cute.Tensor, place: Place):
        """Adds the sums of all warps along K, in order, and stores this CTA's part."""
        cfg = self.config
        m, n = operands.mY.shape
        token_vecs = ROWS // STORE
        first = place.rank * cfg.threads + place.tidx
        alpha = operands.alpha
        if const_expr(not cfg.is_mx):
            alpha = alpha * Float32(PATTERN_SCALE)
        for i in cutlass.range(first, cfg.tokens * token_vecs, cfg.splits * cfg.threads, unroll=1):
            token, row = i // token_vecs, i % token_vecs * STORE
            rSum = cute.make_rmem_tensor(STORE, Float32)
            rSum.fill(0.0)
            for r in cutlass.range_constexpr(cfg.splits):
                for w in cutlass.range_constexpr(cfg.warps_k):
                    place_of_sum = (w * cfg.tokens + token) * PART_PITCH + row
                    ptr = sPart.iterator + cute.assume(place_of_sum, divby=STORE)
                    if const_expr(cfg.splits > 1):
                        ptr = cute.arch.map_dsmem_ptr(ptr, Int32(r))
                    rPart = cute.make_rmem_tensor(STORE, Float32)
                    cute.autovec_copy(cute.make_tensor(ptr, cute.make_layout(STORE)), rPart)
                    rSum.store(rSum.load() + rPart.load())
            y_row, column = place.first_token + token, place.tile * ROWS + row
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


@cute.jit
def load_words(rWords: cute.Tensor, mX: cute.Tensor, offset: Int64, is_valid: Boolean):
    """16 bytes from an element on, or zeros, without reading."""
    elements = VECTOR_BITS // mX.element_type.width
    ptr = cute.recast_ptr(mX.iterator + cute.assume(offset, divby=elements), dtype=Uint32)
    rWords.fill(0)
    if is_valid:
        cute.autovec_copy(cute.make_tensor(ptr, cute.make_layout(WORDS)), rWords)


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
