# SPDX-License-Identifier: Apache-2.0
"""Activations on one FP32 value in registers."""

import cutlass.cute as cute
from cutlass import Float32

LOG2_E = 1.4426950408889634


@cute.jit
def silu(v: Float32) -> Float32:
    """``v / (1 + exp(-v))``, finite for every finite ``v``.

    -inf and NaN give NaN, as the formula does. With ``e = exp(-|v|) <= 1`` the denominator stays in
    [1, 2]; this exponential keeps subnormal results, so the tail below -87 is not flushed to zero.
    """
    e = cute.math.exp2(cute.math.abs(v) * Float32(-LOG2_E), approx=True)
    numerator = v if v >= 0.0 else v * e
    return numerator * cute.math.rcp(e + 1.0, approx=True, ftz=True)
