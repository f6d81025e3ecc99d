# SPDX-License-Identifier: Apache-2.0
"""The cheapest launch there is: one warp, one tensor, one store. Host rows are related to it.

Formula: y[0] = 1. Grid: one CTA of one warp. No shared memory, no pipelines.
Source: written for this project.
"""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

THREADS = 32
WORD_BYTES = 4


@cute.kernel
def trivial_kernel(mY: cute.Tensor):
    """Thread 0 stores the one."""
    tidx, _, _ = cute.arch.thread_idx()
    if tidx == 0:
        mY[0] = cutlass.Int32(1)


@cute.jit
def trivial_launch(mY: cute.Tensor, stream):
    """Launches the kernel once."""
    trivial_kernel(mY).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)


def compile_trivial(options: str = "--enable-tvm-ffi") -> Callable[..., object]:
    """Compiles for the current device; returns the TVM-FFI function of one int32 ``[1]``."""
    compiled = cute.compile(
        trivial_launch,
        make_fake_compact_tensor(cutlass.Int32, (1,), assumed_align=WORD_BYTES),
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options=options,
    )
    unwrap = getattr(compiled, "__tvm_ffi_object__", None)
    return (unwrap() if unwrap else None) or compiled
