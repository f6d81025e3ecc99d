# SPDX-License-Identifier: Apache-2.0
"""BF16 register vectors."""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

HIGH_HALF = -65536  # 0xffff0000 as a signed word


@cute.jit
def widen(x: cute.TensorSSA) -> cute.TensorSSA:
    """``float(x)`` of an even number of BF16 values.

    One shift or mask each; ptxas makes more than one instruction of a conversion.
    """
    rX = cute.make_rmem_tensor(x.shape, BFloat16)
    rX.store(x)
    rPairs = cute.recast_tensor(rX, Int32)
    rY = cute.make_rmem_tensor(x.shape, Float32)
    rBits = cute.recast_tensor(rY, Int32)
    for i in cutlass.range_constexpr(cute.size(rPairs)):
        rBits[2 * i] = rPairs[i] << 16
        rBits[2 * i + 1] = rPairs[i] & HIGH_HALF
    return rY.load()
