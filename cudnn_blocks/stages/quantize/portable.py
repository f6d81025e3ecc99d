# SPDX-License-Identifier: Apache-2.0
"""Quantisers of 16-bit values: per-tensor e4m3, MXFP8, MXFP4 and NVFP4 (sm_80 and newer).

    codes = sat_e4m3(float(x) * scale)                              per tensor
    codes = sat(x / s), s the scale of its block                    RNE everywhere

    E8M0:  s = the smallest power of two >= amax * fp32(1 / largest code), from 2**-127 to 2**127
    e4m3:  s = sat_e4m3(max(amax * fp32(1 / 6), 2**-9))

A block with a NaN has scale NaN and codes 0. The bits are those of the reference on every target:
a power of two divides exactly, and for a quotient by an e4m3 scale the product with an approximate
reciprocal does: no quotient of BF16 values comes close to a midpoint of e2m1 without being it.

Grid:      x only: the CTAs of batch 0, of batch 1 ... No limit on either. No shared memory.
Threads:   neighbouring threads hold neighbouring 16-byte vectors of x; all are loaded before the
           first use. Blocks of channels: ``tokens`` tokens a thread, and ``block_lanes`` lanes
           share a scale, whose largest magnitude is a butterfly. Blocks of 32 tokens: 8 tokens a
           thread; a warp holds 64 channels of one block. Threads beyond the data write the padding
           of the blobs.
Overlap:   with PDL the next grid may start at once; all memory is touched after the wait.
Requires:  D a multiple of 8, and of the block where blocks lie along D; innermost strides 1, others
           multiples of 8, those of codes in bytes; 16-byte aligned pointers; vectors of one batch,
           padding included, at most 2**31 - 2**16. 64-bit offsets. A blob per (b, h), contiguous.
Source:    written for this project; formats after the OCP MX specification and NVIDIA's NVFP4.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass.cute.nvgpu import CacheEvictionPriority
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from cudnn_blocks.quant_spec import E4M3
from cudnn_blocks.stages.device.bf16 import widen
from cudnn_blocks.stages.device.codes import (
    E2M1_LARGEST,
    E4M3_LARGEST,
    E4M3_NAN,
    blob_offset,
    decode_scale_e4m3,
    encode_e2m1x8,
    encode_e4m3x4,
    encode_e8m0,
    float_of,
    inverse_e8m0,
    signs_of_8,
)
from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.device.masked_store import store_byte_if, store_words_if
from cudnn_blocks.stages.quantize.portable_config import (
    BLOB_TILE_ROWS,
    BLOB_TILE_SCALES,
    VEC,
    QuantizeConfig,
)

PAIRS = 4  # registers of one access
VEC_BYTES = 16
BLOB_ROW_BYTES = 16  # from a row to the next one of a group
MAGNITUDES = 0x7FFF7FFF  # of a pair
SMALLEST_E4M3 = 2.0**-9
WARP_LANES = 32
GROUP_VECS = 8  # neighbouring vectors of a warp where blocks lie along tokens


class QuantizeKernel:
    """One pass over x; see the module docstring."""

    def __init__(self, config: QuantizeConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        codes: cute.Tensor,
        blob: cute.Tensor | None,
        seq_lens: cute.Tensor | None,
        scale: Float32,
        stream,
    ):
        cfg = self.config
        tokens = x.shape[1]
        if const_expr(cfg.along_tokens):
            block_columns = BLOB_TILE_SCALES * self.num_tiles(tokens)
            batch_threads = block_columns * (WARP_LANES // GROUP_VECS) * cfg.token_vecs
        else:
            batch_threads = (self.num_rows(tokens) - 1) // cfg.tokens + 1
            batch_threads = batch_threads * cfg.token_vecs
        batch_ctas = (batch_threads - 1) // cfg.threads + 1
        divisor = cute.fast_divmod_create_divisor_v2(batch_ctas)
        self.kernel(x, codes, blob, seq_lens, scale, divisor).launch(
            grid=(x.shape[0] * batch_ctas, 1, 1),
            block=(cfg.threads, 1, 1),
            stream=stream,
            use_pdl=cfg.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mCodes: cute.Tensor,
        mBlob: cute.Tensor | None,
        mSeqLens: cute.Tensor | None,
        scale: Float32,
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
        if const_expr(cfg.along_tokens):
            self.quantize_tokens(mX, mCodes, mBlob, mSeqLens, b, index)
        else:
            self.quantize_channels(mX, mCodes, mBlob, scale, b, index)

    @cute.jit
    def quantize_channels(
        self,
        mX: cute.Tensor,
        mCodes: cute.Tensor,
        mBlob: cute.Tensor | None,
        scale: Float32,
        b: Int32,
        index: Uint32,
    ):
        """Per tensor, or blocks of neighbouring channels."""
        cfg = self.config
        token_vecs, head_vecs = Uint32(cfg.token_vecs), Uint32(cfg.head_vecs)
        vec = index % token_vecs
        first = Int32(index // token_vecs) * cfg.tokens
        head, column = Int32(vec // head_vecs), Int32(vec % head_vecs) * VEC
        is_data = column < cfg.d_head
        num_rows = self.num_rows(mX.shape[1])
        if const_expr(cfg.block is not None):
            scales = cfg.head_vecs // cfg.block_lanes
            start = (Int64(b) * cfg.heads + head) * (Int64(num_rows) * scales)
            scale_index = vec % head_vecs // Uint32(cfg.block_lanes)
            start += blob_offset(Uint32(first), scale_index, Uint32(scales // BLOB_TILE_SCALES))
            holds_scale = vec % Uint32(cfg.block_lanes) == 0
        rX = cute.make_rmem_tensor((PAIRS, cfg.tokens), Uint32)
        for t in cutlass.range_constexpr(cfg.tokens):
            self.load(mX, b, first + t, head, column, rX[None, t])
        for t in cutlass.range_constexpr(cfg.tokens):
            token = first + t
            rV = self.widened(rX[None, t])
            if const_expr(cfg.block is None):
                for i in cutlass.range_constexpr(VEC):
                    rV[i] = rV[i] * scale
                rWords = self.encoded_e4m3(rV)
            else:
                code, inverse = self.scale_of(self.block_amax(rX[None, t]))
                rWords = self.encoded(rX[None, t], rV, code, inverse)
                byte = code if is_data & (token < mX.shape[1]) else Uint32(0)
                # Neighbouring tokens of a thread lie within one group of 32 rows.
                gByte = mBlob.iterator + (start + t * BLOB_ROW_BYTES)
                store_byte_if(holds_scale & (token < num_rows), byte, gByte)
            self.store(mCodes, b, token, head, column, rWords, is_data & (token < mX.shape[1]))

    @cute.jit
    def quantize_tokens(
        self,
        mX: cute.Tensor,
        mCodes: cute.Tensor,
        mBlob: cute.Tensor,
        mSeqLens: cute.Tensor | None,
        b: Int32,
        index: Uint32,
    ):
        """Blocks of neighbouring tokens of one channel."""
        cfg = self.config
        head_vecs, groups = Uint32(cfg.head_vecs), Uint32(cfg.token_vecs // GROUP_VECS)
        warp, lane = index // Uint32(WARP_LANES), index % Uint32(WARP_LANES)
        vec = warp % groups * GROUP_VECS + lane % Uint32(GROUP_VECS)
        part, block_column = Int32(lane // Uint32(GROUP_VECS)), Int32(warp // groups)
        first = block_column * cfg.block.block_size + part * cfg.tokens
        head, column = Int32(vec // head_vecs), Int32(vec % head_vecs) * VEC
        is_data = column < cfg.d_head
        limit = mX.shape[1]
        if const_expr(cfg.has_seq_lens):
            limit = cutlass.min(mSeqLens[b], limit)
        rX = cute.make_rmem_tensor((PAIRS, cfg.tokens), Uint32)
        for t in cutlass.range_constexpr(cfg.tokens):
            self.load(mX, b, first + t, head, column, rX[None, t])
        rAmax = cute.make_rmem_tensor(PAIRS, Uint32)
        rAmax.fill(0)
        for t in cutlass.range_constexpr(cfg.tokens):
            for p in cutlass.range_constexpr(PAIRS):
                pair = rX[p, t] if first + t < limit else Uint32(0)
                rX[p, t] = pair
                rAmax[p] = self.larger(rAmax[p], pair & MAGNITUDES)
        rCodes = cute.make_rmem_tensor(VEC, Uint32)
        rInverse = cute.make_rmem_tensor(VEC, Float32)
        for p in cutlass.range_constexpr(PAIRS):
            amax = rAmax[p]
            for step in cutlass.range_constexpr(2):
                other = cute.arch.shuffle_sync_bfly(amax, GROUP_VECS << step)
                amax = self.larger(amax, other)
            low, high = self.halves(amax)
            rCodes[2 * p], rInverse[2 * p] = self.scale_of(low)
            rCodes[2 * p + 1], rInverse[2 * p + 1] = self.scale_of(high)
        self.store_token_scales(mBlob, rCodes, b, head, column, block_column, part, mX.shape[1])
        for t in cutlass.range_constexpr(cfg.tokens):
            rV = self.widened(rX[None, t])
            for i in cutlass.range_constexpr(VEC):
                rV[i] = rV[i] * rInverse[i]
            for i in cutlass.range_constexpr(VEC):
                rV[i] = Float32(0.0) if rCodes[i] == 0xFF else rV[i]
            is_stored = is_data & (first + t < mX.shape[1])
            self.store(mCodes, b, first + t, head, column, self.encoded_e4m3(rV), is_stored)

    @cute.jit
    def store_token_scales(
        self,
        mBlob: cute.Tensor,
        rCodes: cute.Tensor,
        b: Int32,
        head: Int32,
        column: Int32,
        block_column: Int32,
        part: Int32,
        tokens: Int32,
    ):
        """The scales of eight channels, two by each of the four lanes that hold them."""
        cfg = self.config
        num_tiles = self.num_tiles(tokens)
        rows = cfg.head_vecs * VEC
        start = (Int64(b) * cfg.heads + head) * (Int64(num_tiles) * (rows * BLOB_TILE_SCALES))
        is_data = (column < cfg.d_head) & (block_column * cfg.block.block_size < tokens)
        is_column = block_column < num_tiles * BLOB_TILE_SCALES
        for i in cutlass.range_constexpr(VEC):
            where = start + blob_offset(Uint32(column + i), Uint32(block_column), Uint32(num_tiles))
            byte = rCodes[i] if is_data else Uint32(0)
            store_byte_if(is_column & (part == i // 2), byte, mBlob.iterator + where)

    def num_rows(self, tokens: Int32) -> Int32:
        """Tokens, and those that pad the scales."""
        if self.config.block is None:
            return tokens
        return ((tokens - 1) // BLOB_TILE_ROWS + 1) * BLOB_TILE_ROWS

    def num_tiles(self, tokens: Int32) -> Int32:
        """Tiles of a row of scales where blocks lie along tokens."""
        return (tokens - 1) // (self.config.block.block_size * BLOB_TILE_SCALES) + 1

    @cute.jit
    def larger(self, a: Uint32, b: Uint32) -> Uint32:
        """The larger ones of two pairs; NaN wins."""
        return cute.arch.inline_ptx(
            "max.NaN.bf16x2 {$w0}, {$r0}, {$r1};",
            write_only_types=[Uint32],
            read_only_args=[a, b],
        )

    @cute.jit
    def halves(self, pair: Uint32) -> tuple[Float32, Float32]:
        """Both numbers of a pair."""
        return float_of(pair << 16), float_of(pair & Uint32(0xFFFF0000))

    @cute.jit
    def block_amax(self, rX: cute.Tensor) -> Float32:
        """The largest magnitude of the block that this thread's vector is part of."""
        low = self.larger(rX[0] & MAGNITUDES, rX[1] & MAGNITUDES)
        high = self.larger(rX[2] & MAGNITUDES, rX[3] & MAGNITUDES)
        amax = self.larger(low, high)
        distance = 1
        while const_expr(distance < self.config.block_lanes):
            amax = self.larger(amax, cute.arch.shuffle_sync_bfly(amax, distance))
            distance *= 2
        amax = self.larger(amax, amax >> 16)
        return self.halves(amax)[0]

    @cute.jit
    def scale_of(self, amax: Float32) -> tuple[Uint32, Float32]:
        """A block's scale code and the factor of its values."""
        cfg = self.config
        largest = E4M3_LARGEST if const_expr(cfg.is_e4m3) else E2M1_LARGEST
        scale = amax * Float32(1 / largest)
        if const_expr(cfg.block.scale_dtype == E4M3):
            r = cute.make_rmem_tensor(4, Float32)
            r.fill(0.0)
            r[0] = cute.arch.fmax(scale, SMALLEST_E4M3)
            code = encode_e4m3x4(r, cfg.has_cvt)
            inverse = cute.math.rcp(decode_scale_e4m3(code), approx=True, ftz=True)
            code = Uint32(E4M3_NAN) if amax != amax else code
            return code, inverse
        code = encode_e8m0(scale)
        return code, inverse_e8m0(code)

    @cute.jit
    def encoded(
        self, rX: cute.Tensor, rV: cute.Tensor, code: Uint32, inverse: Float32
    ) -> cute.Tensor:
        """Words of codes of one vector, all of one block."""
        cfg = self.config
        is_e4m3_scale = cfg.block.scale_dtype == E4M3
        keep = Uint32(0) if code == (E4M3_NAN if is_e4m3_scale else 0xFF) else Uint32(0xFFFFFFFF)
        if const_expr(cfg.is_e4m3):
            for i in cutlass.range_constexpr(VEC):
                rV[i] = rV[i] * inverse
            rWords = self.encoded_e4m3(rV)
        else:
            for i in cutlass.range_constexpr(VEC):
                rV[i] = cute.math.abs(rV[i]) * inverse
            rWords = cute.make_rmem_tensor(1, Uint32)
            rWords[0] = encode_e2m1x8(rV) | signs_of_8(rX)
        for w in cutlass.range_constexpr(cute.size(rWords)):
            rWords[w] = rWords[w] & keep
        return rWords

    @cute.jit
    def encoded_e4m3(self, rV: cute.Tensor) -> cute.Tensor:
        """Two words of codes."""
        rWords = cute.make_rmem_tensor(2, Uint32)
        for w in cutlass.range_constexpr(2):
            quarter = cute.make_tensor(rV.iterator + 4 * w, cute.make_layout(4))
            rWords[w] = encode_e4m3x4(quarter, self.config.has_cvt)
        return rWords

    @cute.jit
    def widened(self, rX: cute.Tensor) -> cute.Tensor:
        """A vector in FP32."""
        x = cute.recast_tensor(rX, self.dtype).load()
        rV = cute.make_rmem_tensor(VEC, Float32)
        rV.store(widen(x) if const_expr(self.dtype is BFloat16) else x.to(Float32))
        return rV

    @cute.jit
    def load(
        self, mX: cute.Tensor, b: Int32, token: Int32, head: Int32, column: Int32, rX: cute.Tensor
    ):
        """16 bytes; beyond the end the last ones stand in, of which nothing is stored."""
        cfg = self.config
        token = cutlass.min(token, mX.shape[1] - 1)
        if const_expr(cfg.is_padded):
            column = cutlass.min(column, cfg.d_head - VEC)
        offset = self.offset_of(mX, b, token, head) + column
        ptr = cute.recast_ptr(mX.iterator + cute.assume(offset, divby=VEC), dtype=Uint32)
        gX = cute.make_tensor(ptr, cute.make_layout(PAIRS))
        cute.autovec_copy(gX, rX, l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE)

    @cute.jit
    def store(
        self,
        mCodes: cute.Tensor,
        b: Int32,
        token: Int32,
        head: Int32,
        column: Int32,
        rWords: cute.Tensor,
        is_stored: Boolean,
    ):
        column = column // self.config.codes_per_byte
        offset = self.offset_of(mCodes, b, token, head) + column
        store_words_if(is_stored, rWords, mCodes.iterator + offset)

    def offset_of(self, mX: cute.Tensor, b: Int32, token: Int32, head: Int32) -> Int64:
        """Of a head of a token."""
        stride = mX.stride
        return Int64(b) * stride[0] + Int64(token) * stride[1] + Int64(head) * stride[2]


def fake_operands(config: QuantizeConfig) -> tuple:
    """Fake operands in ``__call__`` order, without the stream; B, S and strides are dynamic."""
    b, s = cute.sym_int(), cute.sym_int()

    def strided(dtype, width):
        stride = (*(cute.sym_int64(divisibility=VEC) for _ in range(3)), 1)
        shape = (b, s, config.heads, width)
        return make_fake_tensor(dtype, shape, stride, assumed_align=VEC_BYTES)

    def compact(dtype, extent, align):
        return make_fake_compact_tensor(dtype, (extent,), stride_order=(0,), assumed_align=align)

    return (
        strided(DTYPES[config.dtype], config.d_head),
        strided(Uint8, config.d_head // config.codes_per_byte),
        None if config.block is None else compact(Uint8, cute.sym_int64(), VEC_BYTES),
        compact(Int32, b, 4) if config.has_seq_lens else None,
        Float32(1.0),
    )
