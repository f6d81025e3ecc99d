# SPDX-License-Identifier: Apache-2.0
"""Prefetches into L2; coherent at any time, since L2 is where all SMs meet."""

import cutlass.cute as cute
from cutlass import Int32


@cute.jit
def prefetch_l2(ptr: cute.Pointer, num_bytes: Int32) -> None:
    """Fetches ``num_bytes`` at ``ptr``, both multiples of 16 (sm_90 and newer)."""
    cute.arch.inline_ptx(
        "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
        read_only_args=[ptr.toint(), num_bytes],
    )


@cute.jit
def prefetch_l2_line(ptr: cute.Pointer) -> None:
    """Fetches the line that holds ``ptr``."""
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[ptr.toint()])
