# SPDX-License-Identifier: Apache-2.0
"""SiLU of BF16 values held as FP32 vectors."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

# -log2(e): a head of 16 bits, whose product with a BF16 value is exact; the rest, times ln 2.
HEAD = -1.44268798828125
TAIL_LN2 = -4.8884951e-06
EXP_IS_ZERO = 128.0  # exp(-x) is below half an ulp of 1 long before


@cute.jit
def silu_of_bf16(x: cute.TensorSSA) -> cute.TensorSSA:
    """``x / (1 + exp(-x))`` to 3 ulp, for ``x`` that BF16 can hold; -inf and NaN give NaN.

    ``exp(-x) = head * (1 + tail)``: the argument of the hardware's 2 ulp exp2 is exact, and the
    factor makes up for what it leaves out, so that large arguments lose nothing. The factor is
    rounded before the product: one instruction less, and fewer registers, than adding it behind.
    Below x = -87.3 the reciprocal underflows and the result is -0; the formula's own value, at most
    1e-36 in magnitude, ends at x = -88.7.
    """
    rBounded = cute.make_rmem_tensor(x.shape, Float32)
    for i in cutlass.range_constexpr(cute.size(x.shape)):
        # One instruction, where a minimum that keeps NaN takes three; x itself carries the NaN.
        rBounded[i] = cute.arch.fmin(x[i], EXP_IS_ZERO)
    bounded = rBounded.load()
    one = cute.full_like(x, 1.0)
    head = cute.math.exp2(bounded * HEAD, fastmath=True)
    tail = cute.math.fma(bounded, cute.full_like(x, TAIL_LN2), one)
    den = cute.math.fma(head, tail, one)
    return x * cute.math.rcp(den, approx=True, ftz=True)
