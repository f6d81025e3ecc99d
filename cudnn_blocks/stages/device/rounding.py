# SPDX-License-Identifier: Apache-2.0
"""FP32 arithmetic on register vectors with its rounding points to BF16, written ``B(.)``."""

import cutlass.cute as cute
from cutlass import BFloat16, Float32

NORM_FLOOR = 1e-12
"""Smallest L2 norm that a row is divided by."""
LARGEST_FINITE = 3.4028234663852886e38


@cute.jit
def add_rounded(x: cute.TensorSSA, y: cute.TensorSSA) -> cute.TensorSSA:
    """``B(float(x) + float(y))``."""
    return (x.to(Float32) + y.to(Float32)).to(BFloat16)


@cute.jit
def row_divisor(sum_of_squares: Float32) -> tuple[Float32, Float32]:
    """``den = max(sqrt(sum), 1e-12)`` and ``1 / den``, each rounded once, for :func:`divide`.

    A NaN sum stays NaN. An infinite one comes back as 0, 0, with which :func:`divide` gives what a
    division by infinity does: 0 for finite values, NaN for others.
    """
    den = cute.math.sqrt(sum_of_squares)
    den = Float32(NORM_FLOOR) if den < NORM_FLOOR else den
    inverse = cute.math.rcp(den, rounding=cute.math.RoundingMode.NEAREST_EVEN)
    den = Float32(0.0) if den > LARGEST_FINITE else den
    return den, inverse


@cute.jit
def divide(x: cute.TensorSSA, den: Float32, inverse: Float32) -> cute.TensorSSA:
    """``x / den`` rounded once: the product by the inverse, corrected by its exact remainder."""
    quotient = x * inverse
    remainder = cute.math.fma(-quotient, cute.full_like(x, den), x)
    return cute.math.fma(remainder, cute.full_like(x, inverse), quotient)
