# SPDX-License-Identifier: Apache-2.0
"""Matrix product of activations and weights, with a choice of epilogues (sm_80 and newer).

    acc[m, n] = sum_k f32(x[m, k]) * f32(w[n, k])          FP32, k in steps of 16
    y[m, n]   = A(acc)                                      plain, and the bands GATE and V
    y[m, n]   = A(rope(acc * rsqrt(mean(acc**2) + eps) * norm_weight))      bands Q and K

A rounds to the activation dtype, once. The mean is over a head; norm and RoPE are FP32. With a
factor all of it works on ``alpha * acc``, rounded to FP32; e4m3 codes have one, and become BF16:

    q8, k8, v8 = sat_e4m3(FP32 result * scale of the band)      GATE stays BF16, on its own

Codes are copied and loaded as pairs, as 16-bit values are, and become BF16 in registers: 4 of a
lane's neighbouring codes are two operands, in an order of K that x and w share.

Grid:          x only, one CTA per tile of ``m x n``; groups of tiles along M, M fastest in a group,
               then N. mma.sync m16n8k16.
Warps:         ``warps_m x warps_n``, each m16n8 blocks of its part of the tile.
Pipeline:      cp.async groups, one per 32 elements of K, ``num_stages - 1`` of them ahead; one
               barrier a stage. Rows and columns past the edges, and K past its end, are zeros.
Shared memory: rows of 64 bytes, whose 16-byte columns are XOR-ed with bits 1 and 2 of the row's
               number: any 8 consecutive rows are free of conflicts. The epilogue's FP32 rows take
               the stages' place. At most 96 KiB, so that every target has room.
Epilogue:      16 rows of every warp at a time through shared memory; then ``n / 8`` lanes own a
               row, 8 columns each, and store them as 16 bytes. The row sum is a butterfly, and the
               other channel of a pair is read from the row.
Overlap:       with PDL the next grid may start at once; all memory is touched after the wait.
Requires:      x, w and y 16-byte aligned with row pitches that are multiples of 8, of 16 for codes;
               K and N multiples of 8, K of codes of 16; B * S up to 2**31 - 2**16 rows.
Source:        written for this project; behaviour after the fused projection of cudnn-frontend's
               gated attention block. No code copied.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from cudnn_blocks.stages.device.codes import encode_e4m3x4
from cudnn_blocks.stages.device.control import opaque
from cudnn_blocks.stages.device.cp_async import cp_async_16_or_zero
from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.device.masked_store import store_words_if
from cudnn_blocks.stages.device.packed_codes import e4m3_to_bf16
from cudnn_blocks.stages.gemm.entry_points import CodedNormRoped, NormRoped, Plain, Scaled
from cudnn_blocks.stages.gemm.portable_config import (
    K_TILE,
    K_VECS,
    MMA_K,
    MMA_M,
    MMA_N,
    RASTER_GROUP,
    VEC,
    WARP_THREADS,
    GemmKernelConfig,
    smem_bytes,
)
from cudnn_blocks.stages.gemm.portable_operands import (
    CodedBands,
    NormRopeOperands,
    fake_operands,
    rows_of,
)

__all__ = ["GemmKernel", "GemmKernelConfig", "GemmNormRopeKernel", "fake_operands", "smem_bytes"]


@dataclass(frozen=True)
class TileOrigin:
    """Where a CTA's tile starts."""

    row: Int32
    column: Int32


class GemmKernel(Plain):
    """A plain product; see the module docstring."""

    def __init__(self, config: GemmKernelConfig):
        self.config = config

    @cute.jit
    def launch(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        y: cute.Tensor,
        operands: NormRopeOperands | None,
        alpha: Float32 | None,
        stream,
    ):
        cfg = self.config
        mX, mY = rows_of(x), rows_of(y)
        if const_expr(cfg.is_fp8):
            mX, w = code_pairs(mX), code_pairs(w)
        tiles_m = (mY.shape[0] - 1) // cfg.tile.m + 1
        columns = w.shape[0] if const_expr(cfg.has_codes) else mY.shape[1]
        tiles_n = (columns - 1) // cfg.tile.n + 1
        self.kernel(mX, w, mY, operands, alpha, tiles_m, tiles_n).launch(
            grid=(tiles_m * tiles_n, 1, 1),
            block=(cfg.threads, 1, 1),
            stream=stream,
            use_pdl=cfg.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mW: cute.Tensor,
        mY: cute.Tensor,
        operands: NormRopeOperands | None,
        alpha: Float32 | None,
        tiles_m: Int32,
        tiles_n: Int32,
    ):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        origin = self.tile_origin(bidx, tiles_m, tiles_n)
        smem = SmemAllocator()
        sChunk = smem.allocate_tensor(
            Float32, cute.make_layout(smem_bytes(cfg) // 4), byte_alignment=128
        )
        stages = cute.recast_ptr(sChunk.iterator, dtype=DTYPES[cfg.output_dtype])
        sStages = cute.make_tensor(
            stages, cute.make_layout(cfg.stage_elements * cfg.tile.num_stages)
        )
        tCrC = self.accumulate(mX, mW, sStages, origin, tidx)
        self.finish(tCrC, sChunk, mY, operands, alpha, origin, tidx)

    @cute.jit
    def tile_origin(self, tile: Int32, tiles_m: Int32, tiles_n: Int32) -> TileOrigin:
        """Groups of ``RASTER_GROUP`` tiles along M; the last group may be narrower."""
        group = tile // (RASTER_GROUP * tiles_n)
        first = group * RASTER_GROUP
        rest = tile - first * tiles_n
        narrow = cutlass.min(tiles_m - first, RASTER_GROUP)
        n = rest // narrow
        m = first + rest - n * narrow
        return TileOrigin(m * self.config.tile.m, n * self.config.tile.n)

    # Mainloop.

    @cute.jit
    def accumulate(self, mX, mW, sStages, origin: TileOrigin, tidx: Int32) -> cute.Tensor:
        """``((2, 2), m16, n8)`` of this thread; returns when the stages may be overwritten."""
        cfg = self.config
        num_stages = cfg.tile.num_stages
        num_k = (mX.shape[1] - 1) // K_TILE + 1
        for s in cutlass.range_constexpr(num_stages - 1):
            self.copy_stage(mX, mW, sStages, Int32(s), Int32(s), origin, tidx)
            cute.arch.cp_async_commit_group()
        mma_atom = cute.make_mma_atom(
            warp.MmaF16BF16Op(DTYPES[cfg.output_dtype], Float32, (MMA_M, MMA_N, MMA_K))
        )
        layout = cute.make_layout(((2, 2), cfg.warp_m // MMA_M, cfg.warp_n // MMA_N))
        tCrC = cute.make_rmem_tensor(layout, Float32)
        tCrC.fill(0.0)
        read, write = Int32(0), Int32(num_stages - 1)
        for k_tile in cutlass.range(num_k, unroll=1):
            cute.arch.cp_async_wait_group(num_stages - 2)
            cute.arch.sync_threads()
            for k in cutlass.range_constexpr(K_TILE // MMA_K):
                tCrA, tCrB = self.load_fragments(sStages, read, k, tidx)
                if const_expr(k == 0):
                    thread = opaque(tidx) if const_expr(cfg.recomputes) else tidx
                    ahead = k_tile + (num_stages - 1)
                    self.copy_stage(mX, mW, sStages, write, ahead, origin, thread)
                    cute.arch.cp_async_commit_group()
                if const_expr(cfg.is_fp8):
                    for half in cutlass.range_constexpr(2):
                        tCrA_h, tCrB_h = decoded_fragments(tCrA, tCrB, half)
                        cute.gemm(mma_atom, tCrC, tCrA_h, tCrB_h, tCrC)
                else:
                    cute.gemm(mma_atom, tCrC, tCrA, tCrB, tCrC)
            write = read
            read = read + 1 if read < num_stages - 1 else Int32(0)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        return tCrC

    @cute.jit
    def copy_stage(self, mX, mW, sStages, stage, k_tile, origin: TileOrigin, tidx: Int32):
        """Starts this thread's copies of one stage; K past its end is zero, and not read."""
        cfg = self.config
        start = stage * cfg.stage_elements
        k = k_tile * K_TILE + tidx % K_VECS * VEC
        self.copy_rows(mX, sStages, start, origin.row, k, cfg.tile.m, tidx)
        start += cfg.tile.m * K_TILE
        self.copy_rows(mW, sStages, start, origin.column, k, cfg.tile.n, tidx)

    @cute.jit
    def copy_rows(
        self, mX, sStages, start, first_row, k, rows: cutlass.Constexpr[int], tidx: Int32
    ):
        """A 16-byte vector of every ``copy_rows``-th row."""
        cfg = self.config
        row = tidx // K_VECS
        has_k = k < mX.shape[1]
        for i in cutlass.range_constexpr(-(-rows // cfg.copy_rows)):
            r = row + i * cfg.copy_rows
            is_valid = has_k & (first_row + r < mX.shape[0])
            offset = Int64(first_row + r) * mX.stride[0] + k
            src = vector_view(mX, offset if is_valid else Int64(0), VEC).iterator
            dst = vector_view(sStages, start + swizzled(r, tidx % K_VECS), VEC).iterator
            if const_expr((i + 1) * cfg.copy_rows <= rows) or r < rows:
                cp_async_16_or_zero(dst, src, is_valid)

    @cute.jit
    def load_fragments(self, sStages, stage, k: cutlass.Constexpr[int], tidx: Int32):
        """Operands of the k-th k16 step of a stage; a lane gives the address of one row."""
        cfg = self.config
        dtype = DTYPES[cfg.output_dtype]
        ldmatrix_atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(num_matrices=4), dtype)
        lane = cute.arch.lane_idx()
        warp_m, warp_n = self.warp_position(tidx)
        blocks_m, blocks_n = cfg.warp_m // MMA_M, cfg.warp_n // MMA_N
        tCrA = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), blocks_m)), dtype)
        tCrB = cute.make_rmem_tensor(cute.make_layout(((2, 2), blocks_n)), dtype)
        rA = cute.make_tensor(tCrA.iterator, cute.make_layout((VEC, blocks_m)))
        rB = cute.make_tensor(tCrB.iterator, cute.make_layout((VEC, blocks_n // 2)))

        row = warp_m * cfg.warp_m + lane % 16
        offset = stage * cfg.stage_elements + swizzled(row, 2 * k + lane // 16)
        for i in cutlass.range_constexpr(blocks_m):
            src = vector_view(sStages, offset + i * (MMA_M * K_TILE), VEC)
            cute.copy(ldmatrix_atom, src, rA[None, i])
        row = cfg.tile.m + warp_n * cfg.warp_n + lane // 16 * 8 + lane % 8
        offset = stage * cfg.stage_elements + swizzled(row, 2 * k + lane // 8 % 2)
        for j in cutlass.range_constexpr(blocks_n // 2):
            src = vector_view(sStages, offset + j * (2 * MMA_N * K_TILE), VEC)
            cute.copy(ldmatrix_atom, src, rB[None, j])
        return tCrA, tCrB

    def warp_position(self, tidx: Int32):
        """Place along M and along N; ``warps_m`` is a power of 2."""
        warp_idx = cute.arch.make_warp_uniform(tidx // WARP_THREADS)
        warps_m = self.config.tile.warps_m
        return warp_idx % warps_m, warp_idx // warps_m

    # Epilogue.

    @cute.jit
    def finish(self, tCrC, sChunk, mY, operands, alpha, origin: TileOrigin, tidx: Int32):
        """An m16 block of every warp at a time."""
        cfg = self.config
        for i in cutlass.range_constexpr(cfg.warp_m // MMA_M):
            if const_expr(i > 0):
                cute.arch.sync_threads()
            self.stage_chunk(tCrC, sChunk, i, tidx)
            cute.arch.sync_threads()
            self.finish_chunk(sChunk, mY, operands, alpha, origin, i, tidx)

    @cute.jit
    def stage_chunk(self, tCrC, sChunk, i: cutlass.Constexpr[int], tidx: Int32):
        """Writes the i-th m16 block of this warp's part of the tile, in FP32."""
        cfg = self.config
        lane = cute.arch.lane_idx()
        warp_m, warp_n = self.warp_position(tidx)
        row = warp_m * MMA_M + lane // 4
        column = warp_n * cfg.warp_n + lane % 4 * 2
        for r in cutlass.range_constexpr(2):
            start = (row + r * 8) * cfg.chunk_pitch + column
            for j in cutlass.range_constexpr(cfg.warp_n // MMA_N):
                rPair = cute.make_rmem_tensor(2, Float32)
                rPair[0] = tCrC[(0, r), i, j]
                rPair[1] = tCrC[(1, r), i, j]
                cute.autovec_copy(rPair, vector_view(sChunk, start + j * MMA_N, 2))

    @cute.jit
    def finish_chunk(
        self,
        sChunk,
        mY,
        operands,
        alpha,
        origin: TileOrigin,
        i: cutlass.Constexpr[int],
        tidx: Int32,
    ):
        """Epilogue and stores of the chunk's rows; all lanes of a warp take part, stored or not."""
        cfg = self.config
        lane_column = tidx % cfg.lanes * VEC
        step = cfg.threads // cfg.lanes
        column = origin.column + lane_column
        for first in cutlass.range_constexpr(0, cfg.chunk_rows, step):
            place = first + tidx // cfg.lanes
            row = origin.row + place // MMA_M * cfg.warp_m + i * MMA_M + place % MMA_M
            start = place * cfg.chunk_pitch
            rX = cute.make_rmem_tensor(VEC, Float32)
            cute.autovec_copy(vector_view(sChunk, start + lane_column, VEC), rX)
            if const_expr(alpha is not None):
                rX.store(rX.load() * alpha)
            if const_expr(operands is not None):
                self.norm_and_rope(rX, sChunk, start, operands, row, mY.shape[0], column, tidx)
            if const_expr(cfg.has_codes):
                is_gate = operands.bands.is_gate(cfg.norm_rope, column)
                self.store_codes(rX, operands.bands, row, mY.shape[0], column)
                gate_column = column - cfg.norm_rope.h_q * cfg.norm_rope.d_head
                self.store_values(rX, mY, row, gate_column if is_gate else mY.shape[1])
            else:
                self.store_values(rX, mY, row, column)

    @cute.jit
    def store_values(self, rX: cute.Tensor, mY: cute.Tensor, row: Int32, column: Int32):
        """8 columns of a row, rounded; nothing outside."""
        dtype = DTYPES[self.config.output_dtype]
        if (row < mY.shape[0]) & (column < mY.shape[1]):
            rY = cute.make_rmem_tensor(VEC, dtype)
            rY.store(rX.load().to(dtype))
            offset = Int64(row) * mY.stride[0] + column
            cute.autovec_copy(rY, vector_view(mY, offset, VEC))

    @cute.jit
    def store_codes(
        self, rX: cute.Tensor, bands: CodedBands, row: Int32, num_rows: Int32, column: Int32
    ):
        """8 columns of a row of the bands Q, K and V, as codes."""
        band = bands.band(self.config.norm_rope, column)
        rScaled = cute.make_rmem_tensor((4, 2), Float32)
        for e in cutlass.range_constexpr(VEC):
            rScaled[e] = rX[e] * band.scale
        rCodes = cute.make_rmem_tensor(2, Uint32)
        for half in cutlass.range_constexpr(2):
            rCodes[half] = encode_e4m3x4(rScaled[None, half], self.config.has_cvt)
        is_stored = (row < num_rows) & band.is_inside
        store_words_if(is_stored, rCodes, band.pointer(Int64(row) * band.pitch + band.column))

    @cute.jit
    def norm_and_rope(
        self, rX, sChunk, start, operands: NormRopeOperands, row, num_rows, column, tidx: Int32
    ):
        """8 columns of a head of the bands Q and K, in place; other heads stay as they are."""
        cfg, facts = self.config, self.config.norm_rope
        head = column // facts.d_head
        is_q = head < facts.h_q
        k_head = head - facts.first_k_head
        is_normed = is_q | ((k_head >= 0) & (k_head < facts.h_kv))
        channel = column % facts.d_head
        if const_expr(facts.has_norm):
            scale = self.row_scale(rX, operands.eps)
            rW = cute.make_rmem_tensor(VEC, operands.mWq.element_type)
            if is_q:
                cute.autovec_copy(vector_view(operands.mWq, channel, VEC), rW)
            else:
                cute.autovec_copy(vector_view(operands.mWk, channel, VEC), rW)
            for e in cutlass.range_constexpr(VEC):
                rX[e] = rX[e] * scale * rW[e].to(Float32) if is_normed else rX[e]
        if const_expr(facts.rope_dim > 0):
            place = start + tidx % cfg.lanes * VEC
            if const_expr(facts.has_norm or cfg.is_scaled):  # a partner is not its sum any more
                cute.autovec_copy(rX, vector_view(sChunk, place, VEC))
                cute.arch.sync_warp()
            if is_normed & (channel < facts.rope_dim):
                self.rotate(rX, sChunk, place, operands, row if row < num_rows else 0, channel)

    @cute.jit
    def row_scale(self, rX, eps: Float32) -> Float32:
        """``rsqrt(mean(x * x) + eps)`` over the lanes that hold a head."""
        d_head = self.config.norm_rope.d_head
        total = Float32(0.0)
        for e in cutlass.range_constexpr(VEC):
            total = cute.math.fma(rX[e], rX[e], total)
        distance = 1
        while const_expr(distance < d_head // VEC):
            total += cute.arch.shuffle_sync_bfly(total, distance)
            distance *= 2
        return cute.math.rsqrt(total * Float32(1.0 / d_head) + eps, fastmath=True)

    @cute.jit
    def rotate(self, rX, sChunk, place, operands: NormRopeOperands, row, channel):
        """``x * cos + rotate_half(x) * sin`` of 8 channels, of which the last may not rotate."""
        facts = self.config.norm_rope
        rCos = self.load_table(operands.mCos, operands.seq_len, row, channel)
        rSin = self.load_table(operands.mSin, operands.seq_len, row, channel)
        rPartner = cute.make_rmem_tensor(VEC, Float32)
        if const_expr(facts.half % VEC == 0):
            is_low = channel < facts.half
            distance = Int32(facts.half) if is_low else Int32(-facts.half)
            cute.autovec_copy(vector_view(sChunk, place + distance, VEC), rPartner)
            for e in cutlass.range_constexpr(VEC):
                rPartner[e] = -rPartner[e] if is_low else rPartner[e]
        else:
            for e in cutlass.range_constexpr(VEC):
                is_low = channel + e < facts.half
                distance = Int32(facts.half) if is_low else Int32(-facts.half)
                value = sChunk[place + e + distance]
                rPartner[e] = -value if is_low else value
        for e in cutlass.range_constexpr(VEC):
            turned = rX[e] * rCos[e].to(Float32) + rPartner[e] * rSin[e].to(Float32)
            rX[e] = turned if channel + e < facts.rope_dim else rX[e]

    @cute.jit
    def load_table(self, mT, seq_len, row, channel) -> cute.Tensor:
        """8 channels of a row; pair by pair where its rows are not 16-byte aligned."""
        facts = self.config.norm_rope
        b, s = divmod(row, seq_len)
        offset = Int64(b) * mT.stride[0] + Int64(s) * mT.stride[1] + channel
        rT = cute.make_rmem_tensor(VEC, mT.element_type)
        if const_expr(facts.half % VEC == 0):
            cute.autovec_copy(vector_view(mT, offset, VEC), rT)
        else:
            rT.fill(0.0)
            rPairs = cute.make_tensor(rT.iterator, cute.make_layout((2, VEC // 2)))
            for p in cutlass.range_constexpr(VEC // 2):
                if channel + p * 2 < facts.rope_dim:
                    cute.autovec_copy(vector_view(mT, offset + p * 2, 2), rPairs[None, p])
        return rT


class GemmScaledKernel(Scaled, GemmKernel):
    """A plain product with a factor; see the module docstring."""


class GemmNormRopeKernel(NormRoped, GemmKernel):
    """The fused projection; see the module docstring."""


class GemmCodedNormRopeKernel(CodedNormRoped, GemmKernel):
    """The fused projection of codes; see the module docstring."""


def code_pairs(mX: cute.Tensor) -> cute.Tensor:
    """``(ROW, K)`` of codes as ``(ROW, K / 2)`` of 16-bit pairs, which are copied like values."""
    rows, columns = mX.shape
    pitch = cute.assume(mX.stride[0] // 2, divby=VEC)
    pairs = cute.recast_ptr(mX.iterator, dtype=BFloat16)
    return cute.make_tensor(pairs, cute.make_layout((rows, columns // 2), stride=(pitch, 1)))


@cute.jit
def decoded_fragments(
    tCrA: cute.Tensor, tCrB: cute.Tensor, half: cutlass.Constexpr[int]
) -> tuple[cute.Tensor, cute.Tensor]:
    """BF16 operands of one of the two k16 steps that fragments of pairs of codes hold.

    A lane has 4 neighbouring codes of a row where it would have a pair of values; both operands
    have them in the same order, which is not memory's.
    """
    blocks_m, blocks_n = cute.size(tCrA, mode=[1]), cute.size(tCrB, mode=[1])
    rPairs = cute.recast_tensor(tCrA, Uint32)
    rRows = cute.make_tensor(rPairs.iterator, cute.make_layout((2, 2, blocks_m)))  # (ROW, HALF, M)
    rColumns = cute.recast_tensor(tCrB, Uint32)  # (HALF, N)
    rCodes = cute.make_rmem_tensor(2 * blocks_m + blocks_n, Uint32)
    for i in cutlass.range_constexpr(2 * blocks_m):
        rCodes[i] = rRows[i % 2, half, i // 2]
    for j in cutlass.range_constexpr(blocks_n):
        rCodes[2 * blocks_m + j] = rColumns[2 * j + half]
    rValues = cute.make_rmem_tensor(2 * cute.size(rCodes), Uint32)
    e4m3_to_bf16(rCodes, rValues)
    rA = cute.make_rmem_tensor((2, 2, blocks_m), Uint32)  # (ROW, CODES, M)
    for i in cutlass.range_constexpr(2 * blocks_m):
        for codes in cutlass.range_constexpr(2):
            rA[i % 2, codes, i // 2] = rValues[2 * i + codes]
    a = cute.recast_ptr(rA.iterator, dtype=BFloat16)
    b = cute.recast_ptr(rValues.iterator + 4 * blocks_m, dtype=BFloat16)
    return (
        cute.make_tensor(a, cute.make_layout(((2, 2, 2), blocks_m))),
        cute.make_tensor(b, cute.make_layout(((2, 2), blocks_n))),
    )


def swizzled(row, vec):
    """Element offset of 16-byte column ``vec`` of a 64-byte row."""
    return row * K_TILE + (vec ^ (row >> 1 & 3)) * VEC


def vector_view(tensor: cute.Tensor, offset, size: int) -> cute.Tensor:
    """``size`` consecutive elements from a multiple of ``size`` on."""
    iterator = tensor.iterator + cute.assume(offset, divby=size)
    return cute.make_tensor(iterator, cute.make_layout(size))
