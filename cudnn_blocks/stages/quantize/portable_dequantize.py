# SPDX-License-Identifier: Apache-2.0
"""Per-tensor e4m3, MXFP8, MXFP4 and NVFP4 codes to BF16 (sm_80 and newer).

    y = sat_bf16(code * descale)            per tensor, the product rounded to FP32 first
    y = sat_bf16(code * s)                  s the scale of the block

A code times a scale is exact in FP32, and in BF16 within its range: beyond it the largest number
stands in, below it the nearest subnormal. NaN codes and scales give NaN.

Grid:      x only: the CTAs of batch 0, of batch 1 ... No limit on either. No shared memory.
Threads:   each holds 16 neighbouring channels of ``tokens`` neighbouring tokens, which share their
           scales where blocks lie along tokens. All codes are loaded before the first use.
Overlap:   with PDL the next grid may start at once; all memory is touched after the wait.
Requires:  D a multiple of 16, and of the block where blocks lie along D; innermost strides 1,
           others multiples of 8, those of e4m3 of 16; 16-byte aligned pointers; S * H * D / 16 at
           most 2**31 - 2**16. 64-bit offsets. A blob per (b, h), contiguous.
Source:    written for this project; formats after the OCP MX specification and NVIDIA's NVFP4.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import CacheEvictionPriority
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from cudnn_blocks.quant_spec import E4M3
from cudnn_blocks.stages.device.codes import (
    blob_offset,
    decode_e2m1x8,
    decode_e4m3x4,
    decode_e8m0,
    decode_scale_e4m3,
)
from cudnn_blocks.stages.device.masked_store import store_words_if
from cudnn_blocks.stages.quantize.portable_config import (
    BLOB_TILE_ROWS,
    BLOB_TILE_SCALES,
    DEQUANTIZE_VEC,
    DequantizeConfig,
)

STORE_VEC = 8  # BF16 numbers of a 16-byte store
VEC_BYTES = 16


class DequantizeKernel:
    """One pass over the codes; see the module docstring."""

    def __init__(self, config: DequantizeConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        codes: cute.Tensor,
        blob: cute.Tensor | None,
        y: cute.Tensor,
        descale: Float32,
        stream,
    ):
        cfg = self.config
        batch_threads = ((y.shape[1] - 1) // cfg.tokens + 1) * cfg.token_vecs
        batch_ctas = (batch_threads - 1) // cfg.threads + 1
        divisor = cute.fast_divmod_create_divisor_v2(batch_ctas)
        self.kernel(codes, blob, y, descale, divisor).launch(
            grid=(y.shape[0] * batch_ctas, 1, 1),
            block=(cfg.threads, 1, 1),
            stream=stream,
            use_pdl=cfg.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        mCodes: cute.Tensor,
        mBlob: cute.Tensor | None,
        mY: cute.Tensor,
        descale: Float32,
        batch_ctas: cute.FastDivmodDivisorV2,
    ):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        b, tile = divmod(bidx, batch_ctas)
        index = Uint32(tile * cfg.threads + tidx)
        vec = index % Uint32(cfg.token_vecs)
        first = Int32(index // Uint32(cfg.token_vecs)) * cfg.tokens
        head = Int32(vec // Uint32(cfg.head_vecs))
        column = Int32(vec % Uint32(cfg.head_vecs)) * DEQUANTIZE_VEC

        rCodes = cute.make_rmem_tensor((cfg.code_words, cfg.tokens), Uint32)
        for t in cutlass.range_constexpr(cfg.tokens):
            # Past the end the last token stands in; nothing of it is stored.
            token = cutlass.min(first + t, mY.shape[1] - 1)
            offset = self.offset_of(mCodes, b, token, head) + column // cfg.codes_per_byte
            offset = cute.assume(offset, divby=cfg.code_words * 4)
            ptr = cute.recast_ptr(mCodes.iterator + offset, dtype=Uint32)
            gCodes = cute.make_tensor(ptr, cute.make_layout(cfg.code_words))
            cute.autovec_copy(
                gCodes, rCodes[None, t], l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE
            )
        rScale = cute.make_rmem_tensor((DEQUANTIZE_VEC, cfg.tokens), Float32)
        if const_expr(cfg.block is None):
            rScale.fill(descale)
        else:
            self.load_scales(mBlob, rScale, b, head, first, column, mY.shape[1])
        for t in cutlass.range_constexpr(cfg.tokens):
            rV = self.decoded(rCodes[None, t])
            for i in cutlass.range_constexpr(DEQUANTIZE_VEC):
                rV[i] = rV[i] * rScale[i, t]
            offset = self.offset_of(mY, b, first + t, head) + column
            rWords = self.packed(rV)
            for half in cutlass.range_constexpr(2):
                gY = mY.iterator + (offset + half * STORE_VEC)
                store_words_if(first + t < mY.shape[1], rWords[None, half], gY)

    @cute.jit
    def load_scales(
        self,
        mBlob: cute.Tensor,
        rScale: cute.Tensor,
        b: Int32,
        head: Int32,
        first: Int32,
        column: Int32,
        tokens: Int32,
    ):
        """The scale of every code: one a token, or one a channel."""
        cfg = self.config
        size = cfg.block.block_size
        scales, rows = cfg.d_head // size, tokens
        if const_expr(cfg.along_tokens):
            scales, rows = (tokens - 1) // size + 1, cfg.d_head
        num_tiles = (scales - 1) // BLOB_TILE_SCALES + 1
        padded_rows = ((rows - 1) // BLOB_TILE_ROWS + 1) * BLOB_TILE_ROWS
        start = Int64(padded_rows) * (num_tiles * BLOB_TILE_SCALES)
        start = (Int64(b) * cfg.heads + head) * start
        if const_expr(cfg.along_tokens):
            for i in cutlass.range_constexpr(DEQUANTIZE_VEC):
                index = Uint32(cutlass.min(first, tokens - 1) // size)
                offset = blob_offset(Uint32(column + i), index, Uint32(num_tiles))
                scale = self.decoded_scale(mBlob[start + offset])
                for t in cutlass.range_constexpr(cfg.tokens):
                    rScale[i, t] = scale
        else:
            for t in cutlass.range_constexpr(cfg.tokens):
                token = Uint32(cutlass.min(first + t, tokens - 1))
                offset = blob_offset(token, Uint32(column // size), Uint32(num_tiles))
                scale = self.decoded_scale(mBlob[start + offset])
                for i in cutlass.range_constexpr(DEQUANTIZE_VEC):
                    rScale[i, t] = scale

    @cute.jit
    def decoded_scale(self, byte: Uint8) -> Float32:
        code = Uint32(byte)
        if const_expr(self.config.block.scale_dtype == E4M3):
            return decode_scale_e4m3(code)
        return decode_e8m0(code)

    @cute.jit
    def decoded(self, rCodes: cute.Tensor) -> cute.Tensor:
        """16 FP32 numbers."""
        cfg = self.config
        rV = cute.make_rmem_tensor(DEQUANTIZE_VEC, Float32)
        word_codes = DEQUANTIZE_VEC // cfg.code_words
        for w in cutlass.range_constexpr(cfg.code_words):
            if const_expr(cfg.is_e4m3):
                rPart = decode_e4m3x4(rCodes[w], cfg.has_cvt)
            else:
                rPart = decode_e2m1x8(rCodes[w])
            for i in cutlass.range_constexpr(word_codes):
                rV[w * word_codes + i] = rPart[i]
        return rV

    @cute.jit
    def packed(self, rV: cute.Tensor) -> cute.Tensor:
        """(4, 2) words of BF16 numbers, saturating; NaN stays."""
        rWords = cute.make_rmem_tensor((STORE_VEC // 2, 2), Uint32)
        for w in cutlass.range_constexpr(STORE_VEC):
            rWords[w] = cute.arch.inline_ptx(
                "cvt.rn.satfinite.bf16x2.f32 {$w0}, {$r1}, {$r0};",
                write_only_types=[Uint32],
                read_only_args=[rV[2 * w], rV[2 * w + 1]],
            )
        return rWords

    def offset_of(self, mX: cute.Tensor, b: Int32, token: Int32, head: Int32) -> Int64:
        """Of a head of a token."""
        stride = mX.stride
        return Int64(b) * stride[0] + Int64(token) * stride[1] + Int64(head) * stride[2]


def fake_operands(config: DequantizeConfig) -> tuple:
    """Fake operands in ``__call__`` order, without the stream; B, S and strides are dynamic."""
    b, s = cute.sym_int(), cute.sym_int()

    def strided(dtype, width, multiple):
        stride = (*(cute.sym_int64(divisibility=multiple) for _ in range(3)), 1)
        shape = (b, s, config.heads, width)
        return make_fake_tensor(dtype, shape, stride, assumed_align=VEC_BYTES)

    blob = make_fake_compact_tensor(
        Uint8, (cute.sym_int64(),), stride_order=(0,), assumed_align=VEC_BYTES
    )
    return (
        strided(Uint8, config.d_head // config.codes_per_byte, config.code_words * 4),
        None if config.block is None else blob,
        strided(BFloat16, config.d_head, STORE_VEC),
        Float32(1.0),
    )
