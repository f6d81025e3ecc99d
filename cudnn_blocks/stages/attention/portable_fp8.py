# SPDX-License-Identifier: Apache-2.0
"""Attention of e4m3 codes with an optional sigmoid gate (sm_80 and newer).

    s   = q . k                              of codes, FP32 accumulation
    p   = 2 ** (s * c - r + 8)               c = scale * log2(e); FP32; 0 where the key is hidden
    o   = B(sum_j C(p_j) v_j / sum_j p_j * descale_v)
    lse = r * ln(2) + ln(sum_j p_j) - 8 * ln(2)
    o   = B(o * sigmoid(gate))               with a gate
    o   = C(o * scale_o)                     where codes are asked for

B is the rounding to BF16, C that to e4m3, saturating. The kernel is that of 16-bit operands
(portable); codes are copied and laid out as if two of them were one such operand, and become BF16,
which holds them exactly, between shared memory and the product. ``r`` is at most 0.75 below the
maximum so far, so that no weight is beyond 431.

Channels:      a lane gets four neighbouring codes where it would get two 16-bit operands twice.
               Scores sum over channels, so that Q and K may take them in any one order. Of V the
               transposing load brings two channels of two keys: the even ones are one n8 tile of
               the product, the odd ones the next, and a lane ends up with four neighbours.
Grid, warps, pipeline, shared memory, overlap: those of portable; finished rows are BF16.
Requires:      as portable; strides of q, k and v multiples of 16.
Source:        written for this project.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warp

from cudnn_blocks.stages.attention.portable import (
    LOG2_E,
    PAIR,
    QUAD,
    Scales,
    SdpaPortableKernel,
    fake_tensors,
    vector_view,
    warp_index,
)
from cudnn_blocks.stages.attention.portable_config import (
    MMA_K,
    MMA_M,
    MMA_N,
    VEC,
    SdpaPortableConfig,
)
from cudnn_blocks.stages.device.codes import encode_e4m3x4
from cudnn_blocks.stages.device.masked_store import store_words_if
from cudnn_blocks.stages.device.packed_codes import e4m3_to_bf16

__all__ = ["SdpaFp8PortableKernel", "fake_operands"]

STEP = 32  # channels of a row that one x4 load of codes brings


class SdpaFp8PortableKernel(SdpaPortableKernel):
    """One launch of attention of codes; see the module docstring."""

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
        scratch: cute.Tensor | None,
        scale: Float32,
        descale_v: Float32,
        scale_o: Float32,
        stream,
    ):
        num_tiles = self.num_tiles(q)
        self.codes_kernel(
            *(paired(x) for x in (q, k, v)),
            o,
            gate,
            lse,
            seq_lens,
            Scales(scale * LOG2_E, descale_v, scale_o),
            num_tiles,
        ).launch(**self.launch_facts(q, num_tiles), stream=stream)

    @cute.kernel
    def codes_kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mGate: cute.Tensor | None,
        mLse: cute.Tensor | None,
        mLens: cute.Tensor | None,
        scales: Scales,
        num_tiles: Int32,
    ):
        self.run(mQ, mK, mV, mO, mGate, mLse, mLens, scales, num_tiles)

    @cute.jit
    def scores(self, mma_atom, sQ, sK, stage) -> cute.Tensor:
        """QK^T of this warp's rows and a step's keys."""
        cfg = self.config
        ldmatrix_atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(num_matrices=4), self.dtype)
        lane = cute.arch.lane_idx()
        num_tiles = cfg.tile.n // MMA_N
        rQ, rK = codes_registers(cfg.warp_blocks), codes_registers(num_tiles // 2)
        q_row = warp_index() * cfg.warp_rows + lane % 16
        k_row = lane // 16 * 8 + lane % 8
        tSrS = self.accumulator(cfg.tile.n)
        tSrS.fill(0.0)
        for kk in cutlass.range_constexpr(cfg.d_head // STEP):
            offset = self.swizzled(q_row, lane // 16, 2 * kk)
            for i in cutlass.range_constexpr(cfg.warp_blocks):
                src = vector_view(sQ, offset + i * MMA_M * cfg.row_width)
                cute.copy(ldmatrix_atom, src, rQ[None, i])
            offset = stage * cfg.kv_stage + self.swizzled(k_row, lane // 8 % 2, 2 * kk)
            for j in cutlass.range_constexpr(cfg.tile.n // 16):
                src = vector_view(sK, offset + j * 16 * cfg.row_width)
                cute.copy(ldmatrix_atom, src, rK[None, j])
            # Matrices of Q: row groups, then channel groups; of K: channel groups, then key groups.
            wQ, wK = decoded(rQ), decoded(rK)
            for half in cutlass.range_constexpr(2):
                tSrQ, tSrK = self.fragments(((2, 2, 2), cfg.warp_blocks), ((2, 2), num_tiles))
                uQ, uK = cute.recast_tensor(tSrQ, Uint32), cute.recast_tensor(tSrK, Uint32)
                for i in cutlass.range_constexpr(4 * cfg.warp_blocks):
                    uQ[i] = wQ[i // 2 % 2, 2 * half + i % 2, i // 4]
                for i in cutlass.range_constexpr(2 * num_tiles):
                    uK[i] = wK[i % 2, i // 2 % 2 * 2 + half, i // 4]
                cute.gemm(mma_atom, tSrS, tSrQ, tSrK, tSrS)
        return tSrS

    def fragments(self, *shapes) -> list[cute.Tensor]:
        """Operands of products, in registers."""
        return [cute.make_rmem_tensor(cute.make_layout(shape), self.dtype) for shape in shapes]

    @cute.jit
    def weigh(self, mma_atom, tOrO, tSrS, sV, stage):
        """Adds PV to the output."""
        cfg = self.config
        ldmatrix_atom = cute.make_copy_atom(
            warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), self.dtype
        )
        lane = cute.arch.lane_idx()
        num_tiles = cfg.tile.n // MMA_N
        rP = self.rounded(tSrS)
        v_row = lane % 16
        for kk in cutlass.range_constexpr(cfg.tile.n // MMA_K):
            layout = cute.make_layout(
                ((2, 2, 2), cfg.warp_blocks), stride=((1, 2, 4), 4 * num_tiles)
            )
            tOrP = cute.make_tensor(rP.iterator + kk * 8, layout)
            for j in cutlass.range_constexpr(cfg.d_head // STEP):
                rV = codes_registers(1)
                offset = stage * cfg.kv_stage + self.swizzled(v_row, lane // 16, 2 * j)
                src = vector_view(sV, offset + kk * MMA_K * cfg.row_width)
                cute.copy(ldmatrix_atom, src, rV[None, 0])
                # Matrices: key groups, then channel groups; parts: even and odd channels.
                wV = decoded(rV)
                (tOrV,) = self.fragments(((2, 2), 4))
                uV = cute.recast_tensor(tOrV, Uint32)
                for i in cutlass.range_constexpr(8):
                    uV[i] = wV[i // 2 % 2, i // 4 * 2 + i % 2, 0]
                acc = cute.local_tile(tOrO, ((2, 2), cfg.warp_blocks, 4), (0, 0, j))
                cute.gemm(mma_atom, acc, tOrP, tOrV, acc)

    @cute.jit
    def rounded(self, tSrS) -> cute.Tensor:
        """The weights as BF16, after they were rounded to codes."""
        cfg = self.config
        rP = cute.make_rmem_tensor(tSrS.layout, self.dtype)
        words = cute.recast_ptr(rP.iterator, dtype=Uint32)
        uP = cute.make_tensor(words, cute.make_layout(cute.size(rP) // 2))
        for i in cutlass.range_constexpr(cfg.warp_blocks):
            for j in cutlass.range_constexpr(cfg.tile.n // MMA_N):
                # Bytes 0 and 2 become the first pair: row by row, as the accumulators have them.
                rQuad = cute.make_rmem_tensor(4, Float32)
                for e in cutlass.range_constexpr(PAIR):
                    for r in cutlass.range_constexpr(2):
                        rQuad[2 * e + r] = tSrS[(e, r), i, j]
                rWord, rPair = cute.make_rmem_tensor(1, Uint32), cute.make_rmem_tensor(2, Uint32)
                rWord[0] = encode_e4m3x4(rQuad, cfg.has_cvt)
                e4m3_to_bf16(rWord, rPair)
                first = 2 * (i * (cfg.tile.n // MMA_N) + j)
                for r in cutlass.range_constexpr(2):
                    uP[first + r] = rPair[r]
        return rP

    @cute.jit
    def stage_row(self, tOrO, i, r, inverse, is_dead, sQ, local):
        """A lane's part of a row, rounded, to shared memory; 0 by select in a dead row."""
        cfg = self.config
        quad_lane = cute.arch.lane_idx() % QUAD
        for j in cutlass.range_constexpr(cfg.d_head // 16):
            rO = cute.make_rmem_tensor(QUAD, Float32)
            for c in cutlass.range_constexpr(QUAD):
                x = tOrO[(c // 2, r), i, 2 * j + c % 2] * inverse
                rO[c] = Float32(0.0) if is_dead else x
            rY = cute.make_rmem_tensor(QUAD, self.dtype)
            rY.store(rO.load().to(self.dtype))
            offset = self.swizzled(local, quad_lane // 2, 2 * j, cfg.d_head)
            cute.autovec_copy(rY, vector_view(sQ, offset + quad_lane % 2 * QUAD, QUAD))

    @cute.jit
    def store_vector(self, is_stored, x, pointer, scales: Scales):
        """Eight channels of the result, as codes where they are asked for."""
        cfg = self.config
        if const_expr(not cfg.has_o_codes):
            super().store_vector(is_stored, x, pointer, scales)
        else:
            rX, rWords = cute.make_rmem_tensor(VEC, Float32), cute.make_rmem_tensor(2, Uint32)
            rX.store(x.to(Float32) * scales.codes)
            for i in cutlass.range_constexpr(2):
                quad = cute.make_tensor(rX.iterator + 4 * i, cute.make_layout(4))
                rWords[i] = encode_e4m3x4(quad, cfg.has_cvt)
            store_words_if(is_stored, rWords, pointer)


def paired(mX: cute.Tensor) -> cute.Tensor:
    """Codes ``[B, S, H, D]`` as 16-bit elements ``[B, S, H, D / 2]`` of two codes each."""
    shape = (*mX.shape[:3], mX.shape[3] // 2)
    stride = (*(cute.assume(step // 2, divby=VEC) for step in mX.stride[:3]), 1)
    start = cute.recast_ptr(mX.iterator, dtype=BFloat16)
    return cute.make_tensor(start, cute.make_layout(shape, stride=stride))


def codes_registers(count: int) -> cute.Tensor:
    """(8, LOAD): what ``count`` x4 loads bring, as the 16-bit elements that they move."""
    return cute.make_rmem_tensor(cute.make_layout((VEC, count)), BFloat16)


@cute.jit
def decoded(rX: cute.Tensor) -> cute.Tensor:
    """(2, 4, LOAD): words of two BF16 values; the parts of a word of four codes come first."""
    rCodes = cute.recast_tensor(rX, Uint32)
    count = cute.size(rCodes)
    rWords = cute.make_rmem_tensor(cute.make_layout((2, 4, count // 4)), Uint32)
    e4m3_to_bf16(
        cute.make_tensor(rCodes.iterator, cute.make_layout(count)),
        cute.make_tensor(rWords.iterator, cute.make_layout(2 * count)),
    )
    return rWords


def fake_operands(config: SdpaPortableConfig) -> tuple:
    """Fake operands in ``__call__`` order, without the stream; there is no scratch."""
    return (*fake_tensors(config), None, Float32(1.0), Float32(1.0), Float32(1.0))
