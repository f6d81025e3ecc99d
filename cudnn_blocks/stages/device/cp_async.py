# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies from global to shared memory (sm_80 and newer)."""

import cutlass.cute as cute
from cutlass import Boolean, Int32

VECTOR_BYTES = 16


@cute.jit
def cp_async_16(dst: cute.Pointer, src: cute.Pointer) -> None:
    """Starts 16 bytes on their way from ``src`` to ``dst``, both 16-byte aligned, past L1."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16;",
        read_only_args=[dst.toint(), src.toint()],
    )


@cute.jit
def cp_async_16_or_zero(dst: cute.Pointer, src: cute.Pointer, is_valid: Boolean) -> None:
    """As :func:`cp_async_16`; without ``is_valid`` nothing is read and ``dst`` becomes zero."""
    num_bytes = Int32(VECTOR_BYTES) if is_valid else Int32(0)
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[dst.toint(), src.toint(), num_bytes],
    )


@cute.jit
def cp_async_4(dst: cute.Pointer, src: cute.Pointer) -> None:
    """Starts 4 bytes on their way from ``src`` to ``dst``, both 4-byte aligned."""
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;",
        read_only_args=[dst.toint(), src.toint()],
    )


@cute.jit
def cp_async_4_or_zero(dst: cute.Pointer, src: cute.Pointer, is_valid: Boolean) -> None:
    """As :func:`cp_async_4`; without ``is_valid`` nothing is read and ``dst`` becomes zero."""
    num_bytes = Int32(4) if is_valid else Int32(0)
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};",
        read_only_args=[dst.toint(), src.toint(), num_bytes],
    )
