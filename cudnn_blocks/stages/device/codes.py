# SPDX-License-Identifier: Apache-2.0
"""Codes of e4m3, e2m1 and E8M0 in registers, encoded and decoded on any architecture.

Magnitudes and codes order alike, so encoding is rounding a bit pattern: FP32 times the power of two
that takes the smallest normal code to FP32's own smallest normal number has the code in its upper
bits, subnormal codes among them. The conversions of sm_89 and newer give the same bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint16, Uint32, const_expr

E4M3_LARGEST = 448.0
E4M3_NAN = 0x7F
E2M1_LARGEST = 6.0

SIGN = 0x80000000
E4M3_BIAS, E2M1_BIAS, FP32_BIAS = 7, 1, 127
E4M3_TO_FP32 = 2.0 ** (FP32_BIAS - E4M3_BIAS)
E2M1_TO_FP32 = 2.0 ** (FP32_BIAS - E2M1_BIAS)
E4M3_SHIFT = 20  # FP32 bits below a code
F16X2_ONE, F16X2_SIX, F16X2_768 = 0x3C003C00, 0x46004600, 0x62006200
F16X2_EXPONENTS = 0x7C007C00
SMALLEST_NORMAL_E4M3 = 2.0**-6
SUBNORMAL_E4M3 = 2.0**14  # an FP32 number whose ulp is the smallest e4m3
SUBNORMAL_E4M3_BITS = 0x46800000

E8M0_NAN = 0xFF
E8M0_LARGEST = 0xFE
SMALLEST_E8M0_BITS = 0x400000  # 2**-127 in FP32


@cute.jit
def bits_of(x: Float32) -> Uint32:
    """The pattern of a number."""
    r = cute.make_rmem_tensor(1, Float32)
    r[0] = x
    return cute.recast_tensor(r, Uint32)[0]


@cute.jit
def float_of(bits: Uint32) -> Float32:
    """The number of a pattern."""
    r = cute.make_rmem_tensor(1, Uint32)
    r[0] = bits
    return cute.recast_tensor(r, Float32)[0]


@cute.jit
def _round_off(bits: Uint32, shift: cutlass.Constexpr[int]) -> Uint32:
    """``bits / 2**shift``, nearest, ties to even."""
    return (bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift


@cute.jit
def encode_e4m3(x: Float32) -> Uint32:
    """One code in integer arithmetic: nearest, ties to even, saturating; NaN gives 0x7F."""
    magnitude = cute.arch.fmin(cute.math.abs(x), E4M3_LARGEST)
    bits = bits_of(magnitude)
    normal = _round_off(bits, E4M3_SHIFT) - ((FP32_BIAS - E4M3_BIAS) << 3)
    subnormal = bits_of(magnitude + SUBNORMAL_E4M3) - SUBNORMAL_E4M3_BITS
    code = subnormal if magnitude < SMALLEST_NORMAL_E4M3 else normal
    code |= (bits_of(x) >> 24) & 0x80
    return Uint32(E4M3_NAN) if x != x else code


@cute.jit
def encode_e4m3x4(x: cute.Tensor, has_cvt: cutlass.Constexpr[bool]) -> Uint32:
    """Four codes of FP32 registers, the first in the lowest byte; as :func:`encode_e4m3`."""
    if const_expr(has_cvt):
        low, high = (
            cute.arch.inline_ptx(
                "cvt.rn.satfinite.e4m3x2.f32 {$w0}, {$r0}, {$r1};",
                write_only_types=[Uint16],
                read_only_args=[x[i + 1], x[i]],
            )
            for i in (0, 2)
        )
        return Uint32(low) | (Uint32(high) << 16)
    code = encode_e4m3(x[0])
    for i in cutlass.range_constexpr(1, 4):
        code |= encode_e4m3(x[i]) << (8 * i)
    return code


@cute.jit
def encode_e2m1x8(magnitude: cute.Tensor) -> Uint32:
    """Eight codes without signs of FP32 registers, the first in the lowest nibble; saturating.

    They go through FP16, two at a time: right for a number that is a midpoint of two codes to
    within 2**-20 of itself (and counts as it), or is 2**-10 of itself away from every midpoint. So
    are quotients of BF16 numbers by e4m3 ones, and their products with a reciprocal. Twice the unit
    of the code, 1, 2 or 4, times 768 is a sum in whose ulps the unit is 1.
    """
    rPairs = cute.make_rmem_tensor(4, Uint32)
    for p in cutlass.range_constexpr(4):
        rPairs[p] = cute.arch.inline_ptx(
            "{ .reg .b32 q, u, six, one, c; "
            f"mov.b32 six, {F16X2_SIX}; mov.b32 one, {F16X2_ONE}; mov.b32 c, {F16X2_768}; "
            "cvt.rn.f16x2.f32 q, {$r1}, {$r0}; min.f16x2 q, q, six; max.f16x2 u, q, one; "
            f"and.b32 u, u, {F16X2_EXPONENTS}; "
            "fma.rn.f16x2 {$w0}, u, c, q; }",
            write_only_types=[Uint32],
            read_only_args=[magnitude[2 * p], magnitude[2 * p + 1]],
        )
        # Now the exponent says which unit it was, and the lowest bits how many of them.
        rPairs[p] = rPairs[p] + (rPairs[p] >> 9) - 0x10001
    a = cute.arch.prmt(rPairs[0], rPairs[1], 0x6240)
    b = cute.arch.prmt(rPairs[2], rPairs[3], 0x6240)
    even = Uint32(cute.arch.prmt(a, b, 0x5410))
    odd = Uint32(cute.arch.prmt(a, b, 0x7632))
    return (even & 0x0F0F0F0F) | ((odd & 0x0F0F0F0F) << 4)


@cute.jit
def signs_of_8(rPairs: cute.Tensor) -> Uint32:
    """The sign bits of eight 16-bit numbers, as those of eight e2m1 codes."""
    a = cute.arch.prmt(rPairs[0], rPairs[1], 0x7351)
    b = cute.arch.prmt(rPairs[2], rPairs[3], 0x7351)
    even = Uint32(cute.arch.prmt(a, b, 0x5410))
    odd = Uint32(cute.arch.prmt(a, b, 0x7632))
    return ((even >> 4) & 0x08080808) | (odd & Uint32(0x80808080))


@cute.jit
def decode_e4m3x4(word: Uint32, has_cvt: cutlass.Constexpr[bool]) -> cute.Tensor:
    """Four FP32 registers of the codes of a word, exactly."""
    rY = cute.make_rmem_tensor(4, Float32)
    if const_expr(has_cvt):
        rPairs = cute.make_rmem_tensor(2, Uint32)
        for i in cutlass.range_constexpr(2):
            rPairs[i] = cute.arch.inline_ptx(
                "cvt.rn.f16x2.e4m3x2 {$w0}, {$r0};",
                write_only_types=[Uint32],
                read_only_args=[Uint16((word >> (16 * i)) & 0xFFFF)],
            )
        rY.store(cute.recast_tensor(rPairs, cutlass.Float16).load().to(Float32))
    else:
        for i in cutlass.range_constexpr(4):
            code = word << (24 - 8 * i)
            bits = (code & Uint32(SIGN)) | ((code >> 4) & 0x07F00000)
            value = float_of(bits) * Float32(E4M3_TO_FP32)
            is_nan = (code & 0x7F000000) == 0x7F000000
            rY[i] = Float32(float("nan")) if is_nan else value
    return rY


@cute.jit
def decode_e2m1x8(word: Uint32) -> cute.Tensor:
    """Eight FP32 registers of the codes of a word, exactly."""
    rY = cute.make_rmem_tensor(8, Float32)
    for i in cutlass.range_constexpr(8):
        code = word << (28 - 4 * i)
        bits = (code & Uint32(SIGN)) | ((code >> 6) & 0x01C00000)
        rY[i] = float_of(bits) * Float32(E2M1_TO_FP32)
    return rY


@cute.jit
def encode_e8m0(x: Float32) -> Uint32:
    """The smallest power of two, 2**-127 to 2**127, that is at least ``x >= 0``; NaN gives 0xFF."""
    bits = bits_of(x)
    power = (bits + 0x7FFFFF) >> 23
    power = Uint32(0) if bits <= SMALLEST_E8M0_BITS else power
    power = Uint32(E8M0_LARGEST) if power > E8M0_LARGEST else power
    return Uint32(E8M0_NAN) if x != x else power


@cute.jit
def decode_e8m0(code: Uint32) -> Float32:
    """The power of two, or NaN."""
    bits = Uint32(SMALLEST_E8M0_BITS) if code == 0 else code << 23
    bits = Uint32(0x7FC00000) if code == E8M0_NAN else bits
    return float_of(bits)


@cute.jit
def inverse_e8m0(code: Uint32) -> Float32:
    """``1 / decode_e8m0(code)``, exactly; anything for NaN."""
    bits = (E8M0_LARGEST - code) << 23
    return float_of(bits if code < E8M0_LARGEST else Uint32(SMALLEST_E8M0_BITS))


@cute.jit
def decode_scale_e4m3(code: Uint32) -> Float32:
    """A positive e4m3, or NaN."""
    value = float_of(code << E4M3_SHIFT) * Float32(E4M3_TO_FP32)
    return Float32(float("nan")) if code == E4M3_NAN else value


@cute.jit
def blob_offset(row: Uint32, scale: Uint32, num_tiles: Uint32) -> Uint32:
    """Byte of a scale in an F8_128x4 array of ``4 * num_tiles`` scales a row, padding included."""
    tile = (row >> 7) * num_tiles + (scale >> 2)
    return (tile * 32 + (row & 31)) * 16 + ((row >> 5) & 3) * 4 + (scale & 3)
