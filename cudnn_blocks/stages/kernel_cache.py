# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels of this process, one per specialisation, whatever plan asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from cudnn_blocks.errors import DriverError
from cudnn_blocks.target import Target

COMPILE_LOCK = threading.Lock()
"""Held around every ``cute.compile``, which is not thread-safe."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel and its host launcher.

    ``call`` takes the operands in kernel order and the stream handle; it is None when the kernel
    was compiled for another architecture than the GPU at hand. ``cubin`` is kept on request only.
    """

    call: Callable[..., object] | None
    cubin: bytes | None = None


@dataclass(frozen=True)
class KernelCacheStats:
    """Counters since the process started."""

    compiled: int
    found: int


class KernelCache:
    """Compile once per key, also when many threads ask at once.

    Keys hold only what the code depends on: the kernel's config and the target's name.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels: dict[Hashable, CompiledKernel] = {}
        self._compiled = 0
        self._found = 0

    def get(self, key: Hashable, build: Callable[[], CompiledKernel]) -> CompiledKernel:
        """The kernel of ``key``, compiled by ``build`` if nobody has."""
        with self._lock:
            kernel = self._kernels.get(key)
            if kernel is not None:
                self._found += 1
                return kernel
        with COMPILE_LOCK:
            with self._lock:
                kernel = self._kernels.get(key)
            if kernel is None:
                kernel = build()
                with self._lock:
                    self._kernels[key] = kernel
                    self._compiled += 1
            return kernel

    def stats(self) -> KernelCacheStats:
        """Counters."""
        with self._lock:
            return KernelCacheStats(self._compiled, self._found)


KERNELS = KernelCache()


def compile_kernel(
    kernel: object, operands: tuple[object, ...], target: Target, *, keep_cubin: bool = False
) -> CompiledKernel:
    """Compiles a CuTe DSL kernel object for ``target``; needs no GPU.

    Args:
        kernel: an object whose ``__call__`` is a ``@cute.jit`` taking the operands and a stream.
        operands: fake tensors or None, in the order of ``__call__``, without the stream.
        target: the architecture to compile for.
        keep_cubin: keep the device code for inspection; the DSL also writes it to a file in
            ``CUTE_DSL_DUMP_DIR`` or the working folder.

    Raises:
        DriverError: the compiler refused; its own error is chained.
    """
    from cutlass import cute

    options = f"--enable-tvm-ffi --gpu-arch {target.name}" + " --keep-cubin" * keep_cubin
    try:
        compiled = cute.compile(kernel, *operands, cute.runtime.make_fake_stream(), options=options)
    except Exception as error:
        name = type(kernel).__name__
        raise DriverError(f"{name}: the CuTe DSL could not compile it for {target.name}") from error
    return CompiledKernel(_raw_callable(compiled), compiled.__cubin__ if keep_cubin else None)


def _raw_callable(compiled: Any) -> Callable[..., object] | None:
    """The TVM-FFI call without the DSL's Python wrappers around it; None without a handle."""
    import tvm_ffi

    unwrap = getattr(compiled, "__tvm_ffi_object__", None)
    function = unwrap() if callable(unwrap) else compiled
    if function is None or function.__chandle__() == 0:
        return None
    call: Callable[..., object] = tvm_ffi.Function.__call__.__get__(function)
    return call
