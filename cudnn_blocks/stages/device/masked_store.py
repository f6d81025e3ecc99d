# SPDX-License-Identifier: Apache-2.0
"""Masked stores to global memory."""

import cutlass.cute as cute
from cutlass import Boolean, Int32


@cute.jit
def store_16_if(is_stored: Boolean, x: cute.TensorSSA, ptr: cute.Pointer) -> None:
    """16 bytes of registers to ``ptr``, a multiple of 16, by one predicated instruction.

    An ``if`` would not do: the compiler sinks the arithmetic behind ``x`` into its branch, where
    the latencies of one store's values can no longer hide behind those of the next.
    """
    rX = cute.make_rmem_tensor(x.shape, x.dtype)
    rX.store(x)
    rWords = cute.recast_tensor(rX, Int32)
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[ptr.toint(), rWords[0], rWords[1], rWords[2], rWords[3]],
        predicate=is_stored,
    )
