# SPDX-License-Identifier: Apache-2.0
"""The kernel cache's second level: object files in the disk cache, and how they are loaded."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path

from cudnn_blocks.artifacts.disk import DiskCache
from cudnn_blocks.artifacts.kernel_key import UnstableKeyError, kernel_key
from cudnn_blocks.artifacts.location import disk_cache
from cudnn_blocks.stages.kernel_cache import KERNEL_SYMBOL, OPTIONS, CompiledKernel
from cudnn_blocks.stages.toolchain import DSL_DISTRIBUTION

TOOLCHAIN = (
    DSL_DISTRIBUTION,
    f"{DSL_DISTRIBUTION}-libs-base",
    f"{DSL_DISTRIBUTION}-libs-core",
    f"{DSL_DISTRIBUTION}-libs-cu12",
    f"{DSL_DISTRIBUTION}-libs-cu13",
    "apache-tvm-ffi",
)
_DSL_VARIABLES = "CUTE_DSL_"
_HARMLESS = ("DUMP", "CACHE", "CACHING", "LOG", "PRINT", "LIBS", "KEEP", "ARCH", "PROFILING")
"""In the names of variables that leave the code as it is; ``LIBS`` is set by the DSL itself."""


class KernelStore:
    """Loads a kernel from the disk cache, or compiles it while other processes wait for it.

    Args:
        cache: where the object files are.
    """

    def __init__(self, cache: DiskCache) -> None:
        self.cache = cache

    def has(self, key: Hashable) -> bool:
        """Whether the kernel of ``key`` is on disk."""
        return self.object_of(key) is not None

    def object_of(self, key: Hashable) -> Path | None:
        """The object file of the kernel of ``key``; None where it is not on disk."""
        try:
            return self.cache.find(kernel_key(key, compiler_facts()))
        except UnstableKeyError:
            return None

    def get(
        self, key: Hashable, build: Callable[[], CompiledKernel]
    ) -> tuple[CompiledKernel, bool]:
        """The kernel of ``key``, and whether ``build`` made it."""
        try:
            name = kernel_key(key, compiler_facts())
        except UnstableKeyError:  # somebody else's kernel, or edited meanwhile: this process only
            return build(), True
        kernel = self._load(name)
        if kernel is None:
            with self.cache.lock(name):
                kernel = self._load(name)
                if kernel is None:
                    kernel = build()
                    self._save(name, key, kernel)
                    return kernel, True
        return kernel, False

    def _load(self, name: str) -> CompiledKernel | None:
        path = self.cache.find(name)
        if path is None:
            return None
        try:
            return load_kernel(path)
        except Exception:  # sound on disk, and yet no kernel: the DSL raises errors of its own
            self.cache.drop(name)
            return None

    def _save(self, name: str, key: Hashable, kernel: CompiledKernel) -> None:
        if kernel.export is not None:
            try:
                if kernel_key(key, compiler_facts()) == name:
                    self.cache.put(name, kernel.export)
            except UnstableKeyError:
                return
            except Exception as error:  # the DSL's; the kernel itself is sound
                text = f"a compiled kernel cannot be kept on disk: {error}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)


def disk_store() -> KernelStore | None:
    """The store over the disk cache that the environment asks for."""
    cache = disk_cache()
    return None if cache is None else KernelStore(cache)


def load_kernel(path: Path) -> CompiledKernel:
    """The kernel of an object file that ``CompiledKernel.export`` has written."""
    import tvm_ffi
    from cutlass import cute

    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    # The function keeps the loaded code alive.
    return CompiledKernel(tvm_ffi.Function.__call__.__get__(module[KERNEL_SYMBOL]))


def compiler_facts() -> dict[str, str]:
    """What the DSL at hand makes of a kernel depends on these."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_DSL_VARIABLES)
        and not any(part in name.removeprefix(_DSL_VARIABLES) for part in _HARMLESS)
    }
    return {**_versions(), "options": OPTIONS, **variables}


def cuda_major() -> str:
    """Major version of the CUDA toolkit that the DSL at hand compiles with."""
    from cutlass.base_dsl.version_info import CUDA_VERSION

    return str(CUDA_VERSION.major)


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in TOOLCHAIN:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    try:  # two toolkits may be installed; the DSL has picked one
        from cutlass.base_dsl.version_info import CUDA_VERSION
    except ImportError:
        return found
    return {**found, "cuda": str(CUDA_VERSION)}
