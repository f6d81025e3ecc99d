# SPDX-License-Identifier: Apache-2.0
"""Masked stores to global memory."""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32


@cute.jit
def store_16_if(is_stored: Boolean, x: cute.TensorSSA, ptr: cute.Pointer) -> None:
    """16 bytes of registers to ``ptr``, a multiple of 16, by one predicated instruction.

    An ``if`` would not do: the compiler sinks the arithmetic behind ``x`` into its branch, where
    the latencies of one store's values can no longer hide behind those of the next.
    """
    rX = cute.make_rmem_tensor(x.shape, x.dtype)
    rX.store(x)
    store_words_if(is_stored, cute.recast_tensor(rX, Int32), ptr)


@cute.jit
def store_words_if(is_stored: Boolean, rWords: cute.Tensor, ptr: cute.Pointer) -> None:
    """One, two or four 32-bit registers to ``ptr``, a multiple of their size, in the same way."""
    count = cute.size(rWords)
    vector = "" if count == 1 else f".v{count}"
    registers = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
    values = registers if count == 1 else f"{{{registers}}}"
    cute.arch.inline_ptx(
        f"st.global{vector}.b32 [{{$r0}}], {values};",
        read_only_args=[ptr.toint(), *(rWords[i] for i in range(count))],
        predicate=is_stored,
    )


@cute.jit
def store_byte_if(is_stored: Boolean, byte: Uint32, ptr: cute.Pointer) -> None:
    """The lowest 8 bits of a register to ``ptr``, in the same way."""
    cute.arch.inline_ptx(
        "st.global.b8 [{$r0}], {$r1};", read_only_args=[ptr.toint(), byte], predicate=is_stored
    )
