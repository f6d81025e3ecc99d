# SPDX-License-Identifier: Apache-2.0
"""Codes of 8 and 4 bits to BF16, several at a time in integer registers (sm_80 and newer).

A BF16 pattern with a code's bits at the right places is the code's value times a power of two,
subnormal codes and zeros included; one multiplication by the opposite power makes it the value.
Two codes that a shift and a mask bring into the halves of a register lie 16 bits apart, so the
order of the results of a word is that of ``E4M3_ORDER``.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

E4M3_ORDER = (0, 2, 1, 3)
"""Which of a word's 4 codes the halves of the 2 results hold, the low half first."""

MINUS_ZERO = -0x7FFF8000  # 0x80008000: a product plus this is the product, its zeros included
SIGNS = 0x80008000
E4M3_EXPONENT = 120
"""Patterns of e4m3 codes are values times two to the minus this."""
TWO_TO_120 = 0x7B807B80
"""Makes e4m3 patterns values."""
NAN = 0x7FC0
ONES = 0x00010001
"""A bit in both halves."""
EVERY_SIGN = 0x80808080
"""The highest bit of every byte."""


@cute.jit
def multiply_bf16x2(a: Uint32, b: Uint32) -> Uint32:
    """Products of two pairs, rounded to nearest even; subnormal values are kept."""
    return Uint32(cute.arch.fma_packed_bf16x2(Int32(a), Int32(b), Int32(MINUS_ZERO)))


@cute.jit
def saturate_bf16x2(x: Uint32) -> Uint32:
    """Infinities become the largest finite values; NaN stays."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 t, u; mov.b32 u, 0x7F7F7F7F; min.NaN.bf16x2 t, {$r0}, u; "
        "mov.b32 u, 0xFF7FFF7F; max.NaN.bf16x2 {$w0}, t, u; }",
        write_only_types=[Uint32],
        read_only_args=[x],
    )


@cute.jit
def e2m1_pattern(byte: Uint32) -> Uint32:
    """The two codes of a byte times 2**-126, the lower one in the low half."""
    codes = byte & Uint32(0xF) | (byte & Uint32(0xF0)) << 12
    return codes << 12 & Uint32(SIGNS) | codes << 6 & Uint32(0x01C001C0)


@cute.jit
def e4m3_patterns(word: Uint32) -> tuple[Uint32, Uint32]:
    """The 4 codes of a word times 2**-120, in ``E4M3_ORDER``; NaN codes become 480 * 2**-120."""
    magnitude, sign = Uint32(0x07F007F0), Uint32(SIGNS)
    return (
        word << 8 & sign | word << 4 & magnitude,
        word & sign | word >> 4 & magnitude,
    )


@cute.jit
def e4m3_nan_bits(word: Uint32) -> Uint32:
    """Bit 7 of every NaN code among 4; other bits mean nothing before they are masked."""
    return (word & Uint32(0x7F7F7F7F)) + Uint32(0x01010101)


@cute.jit
def with_e4m3_nans(word: Uint32, first: Uint32, second: Uint32) -> tuple[Uint32, Uint32]:
    """The two results of a word of codes, NaN where its codes are."""
    bits = e4m3_nan_bits(word)
    ones = Uint32(ONES)
    return first | (bits >> 7 & ones) * NAN, second | (bits >> 15 & ones) * NAN


@cute.jit
def e4m3_to_bf16(rCodes: cute.Tensor, rValues: cute.Tensor) -> None:
    """Words of 4 codes each to their exact values, in ``E4M3_ORDER``, two a word; NaN stays NaN."""
    nans = Uint32(0)
    for i in cutlass.range_constexpr(cute.size(rCodes)):
        patterns = e4m3_patterns(rCodes[i])
        nans |= e4m3_nan_bits(rCodes[i])
        for j in cutlass.range_constexpr(2):
            rValues[2 * i + j] = multiply_bf16x2(patterns[j], Uint32(TWO_TO_120))
    if (nans & Uint32(EVERY_SIGN)) != 0:
        for i in cutlass.range_constexpr(cute.size(rCodes)):
            first, second = with_e4m3_nans(rCodes[i], rValues[2 * i], rValues[2 * i + 1])
            rValues[2 * i] = first
            rValues[2 * i + 1] = second


@cute.jit
def e8m0_pattern_factor(code: Uint32, exponent: cutlass.Constexpr[int]) -> Uint32:
    """What makes patterns of codes times ``2**-exponent`` values times ``2**(code - 127)``.

    As far as BF16 holds it: of codes from ``254 - exponent`` on, ``e8m0_rest`` is still to come.
    """
    return (cutlass.min(code, Uint32(254 - exponent)) + Uint32(exponent)) * Uint32(ONES << 7)


@cute.jit
def e8m0_rest(code: Uint32, exponent: cutlass.Constexpr[int]) -> Uint32:
    """The factor that ``e8m0_pattern_factor`` leaves, mostly 1; NaN for 255, which is NaN."""
    limit = 254 - exponent
    bits = (cutlass.max(code, Uint32(limit)) + Uint32(127 - limit)) << 7
    bits = Uint32(NAN) if code == 255 else bits
    return bits * Uint32(ONES)


@cute.jit
def e4m3_pattern(code: Uint32) -> Uint32:
    """A code in the low byte times 2**-120, in both halves; NaN stays NaN."""
    bits = (code & Uint32(0x80)) << 8 | (code & Uint32(0x7F)) << 4
    bits = Uint32(NAN) if (code & 0x7F) == 0x7F else bits
    return bits * Uint32(ONES)


@cute.jit
def permute(a: Uint32, b: Uint32, selector: Uint32) -> Uint32:
    """Bytes of ``a`` (0 to 3) and ``b`` (4 to 7), by the nibbles of ``selector``."""
    return cute.arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[a, b, selector],
    )
