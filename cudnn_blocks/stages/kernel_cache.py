# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels of this process, one per specialisation, whatever plan asks for them."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from cudnn_blocks.artifacts import kernel_key as _  # noqa: F401 - before any kernel, for its stamp
from cudnn_blocks.artifacts.refusal import are_compiles_refused
from cudnn_blocks.errors import CompileRefusedError, DriverError
from cudnn_blocks.target import Target

COMPILE_LOCK = threading.Lock()
"""Held around every ``cute.compile``, which is not thread-safe."""
OPTIONS = "--enable-tvm-ffi"
"""Of every compile, beside the target."""
KERNEL_SYMBOL = "cudnn_blocks_kernel"
"""Name of the function in an object file, which holds one kernel."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel and its host launcher.

    ``call`` takes the operands in kernel order and the stream handle; it is None when the kernel
    was compiled for another architecture than the GPU at hand. ``cubin`` is kept on request only.
    ``export`` writes an object file, for a kernel that was just compiled.
    """

    call: Callable[..., object] | None
    cubin: bytes | None = None
    export: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class KernelCacheStats:
    """Counters since the process started."""

    compiled: int
    found: int
    loaded: int = 0
    """Kernels that the second level had."""


class SecondLevel(Protocol):
    """Asked for a kernel that this process does not have yet."""

    def get(
        self, key: Hashable, build: Callable[[], CompiledKernel]
    ) -> tuple[CompiledKernel, bool]:
        """The kernel of ``key``, and whether ``build`` made it."""


class KernelCache:
    """Compile once per key, also when many threads ask at once.

    Keys hold only what the code depends on: the kernel's config and the target's name.

    Args:
        second_level: asked at every miss for what to look into before compiling; may answer None.
    """

    def __init__(self, second_level: Callable[[], SecondLevel | None] = lambda: None) -> None:
        self._second_level = second_level
        self._lock = threading.Lock()
        self._kernels: dict[Hashable, CompiledKernel] = {}
        self._compiled = 0
        self._found = 0
        self._loaded = 0
        self._collected = threading.local()

    def get(self, key: Hashable, build: Callable[[], CompiledKernel]) -> CompiledKernel:
        """The kernel of ``key``, compiled by ``build`` if nobody has."""
        wanted, lists_all = getattr(self._collected, "now", (None, False))
        with self._lock:
            kernel = None if lists_all else self._kernels.get(key)
            if kernel is not None:
                self._found += 1
                return kernel
        if wanted is not None:
            wanted[key] = build
            return CompiledKernel(None)
        if are_compiles_refused():
            build = partial(_refuse, build)
        with COMPILE_LOCK:
            with self._lock:
                kernel = self._kernels.get(key)
            if kernel is None:
                second = self._second_level()
                kernel, is_new = (build(), True) if second is None else second.get(key, build)
                if kernel.export is not None:  # it holds what the compiler made on the way
                    kernel = replace(kernel, export=None)
                with self._lock:
                    self._kernels[key] = kernel
                    self._compiled += is_new
                    self._loaded += not is_new
            return kernel

    @contextmanager
    def collecting(
        self, lists_all: bool = False
    ) -> Iterator[dict[Hashable, Callable[[], CompiledKernel]]]:
        """Within it this thread compiles nothing: what it asks for in vain is listed, by key.

        Args:
            lists_all: list what this process has as well.
        """
        wanted: dict[Hashable, Callable[[], CompiledKernel]] = {}
        self._collected.now = (wanted, lists_all)
        try:
            yield wanted
        finally:
            del self._collected.now

    def stats(self) -> KernelCacheStats:
        """Counters."""
        with self._lock:
            return KernelCacheStats(self._compiled, self._found, self._loaded)


def _second_level() -> SecondLevel | None:
    from cudnn_blocks.stages.bundle_store import second_level

    return second_level()


KERNELS = KernelCache(_second_level)


def _refuse(build: Callable[[], CompiledKernel]) -> CompiledKernel:
    what = f"{build.kernel} for {build.target}" if isinstance(build, KernelBuild) else repr(build)
    raise CompileRefusedError(
        f"{what} is in no bundle and in no cache, and compiles are refused: add its configuration "
        f"to the deploy file that the bundle is made of, or lift refuse_compiles()"
        + (f" ({build.config})" if isinstance(build, KernelBuild) else "")
    )


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

    options = f"{OPTIONS} --gpu-arch {target.name}" + " --keep-cubin" * keep_cubin
    try:
        compiled = cute.compile(kernel, *operands, cute.runtime.make_fake_stream(), options=options)
    except Exception as error:
        name = type(kernel).__name__
        raise DriverError(f"{name}: the CuTe DSL could not compile it for {target.name}") from error
    cubin = compiled.__cubin__ if keep_cubin else None
    return CompiledKernel(_raw_callable(compiled), cubin, partial(_export, compiled))


def resolve(name: str) -> Any:
    """What a dotted name of a module's class or function stands for; imports the module."""
    module, attribute = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), attribute)


@dataclass(frozen=True)
class KernelBuild:
    """How to compile one specialisation, in this process or, as it can be pickled, in another."""

    kernel: str
    """Dotted name of the kernel class; its module has ``fake_operands(config)`` beside it."""
    config: Hashable
    target: Target

    def __call__(self, *, keep_cubin: bool = False) -> CompiledKernel:
        """Compiles it."""
        kernel = resolve(self.kernel)(self.config)
        operands = resolve(f"{self.kernel.rsplit('.', 1)[0]}.fake_operands")(self.config)
        return compile_kernel(kernel, operands, self.target, keep_cubin=keep_cubin)


def _export(compiled: Any, path: Path) -> None:
    compiled.export_to_c(str(path), KERNEL_SYMBOL)


def _raw_callable(compiled: Any) -> Callable[..., object] | None:
    """The TVM-FFI call without the DSL's Python wrappers around it; None without a handle."""
    import tvm_ffi

    unwrap = getattr(compiled, "__tvm_ffi_object__", None)
    function = unwrap() if callable(unwrap) else compiled
    if function is None or function.__chandle__() == 0:
        return None
    call: Callable[..., object] = tvm_ffi.Function.__call__.__get__(function)
    return call
