# SPDX-License-Identifier: Apache-2.0
"""The sigmoid gate, one formula for every kernel that applies it."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, const_expr

from cudnn_blocks.stages.device.bf16 import widen

MINUS_LOG2_E = -1.4426950408889634


@cute.jit
def sigmoid(x: Float32) -> Float32:
    """``1 / (1 + exp(-x))`` in four instructions; NaN gives NaN, -inf gives 0, inf gives 1.

    Relative error at most 5e-6 and, for x > -20, 2e-6: that of the exponent, which grows with x,
    and the 2 ulp of either approximation. Below x = -87.3 the result is 0: where exp(-x) overflows
    its reciprocal is, so nothing needs a bound. Every operation is rounded as it stands: two
    kernels that inline this get the same bits.
    """
    e = cute.math.exp2(x * Float32(MINUS_LOG2_E), approx=True, ftz=True)
    return cute.math.rcp(e + Float32(1.0), approx=True, ftz=True)


@cute.jit
def gated(o: cute.TensorSSA, gate: cute.TensorSSA) -> cute.TensorSSA:
    """``act(float(o) * sigmoid(float(gate)))`` of two vectors of the activation dtype."""
    rY = cute.make_rmem_tensor(o.shape, Float32)
    rGate = cute.make_rmem_tensor(o.shape, Float32)
    if const_expr(o.dtype is BFloat16):
        rY.store(widen(o))
        rGate.store(widen(gate))
    else:
        rY.store(o.to(Float32))
        rGate.store(gate.to(Float32))
    for i in cutlass.range_constexpr(cute.size(o.shape)):
        rY[i] = rY[i] * sigmoid(rGate[i])
    return rY.load().to(o.dtype)
