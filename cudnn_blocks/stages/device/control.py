# SPDX-License-Identifier: Apache-2.0
"""CTA-wide votes, traps, and values that the compiler is not to move."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32


@cute.jit
def trap() -> None:
    """Ends the grid with an asynchronous launch failure."""
    cute.arch.inline_ptx("trap;")


@cute.jit
def opaque(x: Int32) -> Int32:
    """``x``, as a value that was never seen before.

    What depends on it is worked out where it stands: it is neither moved out of a loop nor shared
    with what depends on ``x``, so it needs no registers in between.
    """
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]
    )


@cute.jit
def cta_or(bits: Uint32, sBits: cute.Tensor) -> Uint32:
    """Bitwise OR of ``bits`` over the CTA, in every thread; ``sBits`` is one word per warp."""
    bits = cute.arch.warp_redux_sync(bits, "or")
    # warp_idx() holds a full-warp shuffle: under the branch below it would never return.
    warp_idx = cute.arch.warp_idx()
    if cute.arch.lane_idx() == 0:
        sBits[warp_idx] = bits
    cute.arch.sync_threads()
    total = Uint32(0)
    for w in cutlass.range_constexpr(cute.size(sBits)):
        total |= sBits[w]
    return total
