# SPDX-License-Identifier: Apache-2.0
"""What the kernel cache looks into before it compiles: bundles, then the disk cache."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from cudnn_blocks.artifacts.bundle import Bundle, loaded_bundles
from cudnn_blocks.errors import BundleError
from cudnn_blocks.stages.kernel_cache import KERNEL_SYMBOL, CompiledKernel, SecondLevel
from cudnn_blocks.stages.kernel_store import disk_store


class BundleStore:
    """Loads a kernel from the bundles of this process; what they lack comes from elsewhere.

    Args:
        bundles: looked into in their order.
        following: says what is asked for the rest; may answer None.
    """

    def __init__(
        self, bundles: Sequence[Bundle], following: Callable[[], SecondLevel | None]
    ) -> None:
        self._bundles = bundles
        self._following = following

    def get(
        self, key: Hashable, build: Callable[[], CompiledKernel]
    ) -> tuple[CompiledKernel, bool]:
        """The kernel of ``key``, and whether ``build`` made it."""
        for bundle in self._bundles:
            library = bundle.library_of(key)
            if library is not None:
                return _load(bundle, library), False
        following = self._following()
        return (build(), True) if following is None else following.get(key, build)


def second_level() -> SecondLevel | None:
    """Where kernels come from that this process has not compiled."""
    bundles = loaded_bundles()
    return BundleStore(bundles, disk_store) if bundles else disk_store()


def _load(bundle: Bundle, library: bytes) -> CompiledKernel:
    """Loads checked bytes; the file that the loader wants is private, and gone afterwards."""
    import tvm_ffi

    try:
        with tempfile.TemporaryDirectory(prefix="cudnn_blocks_") as folder:
            path = Path(folder) / "kernel.so"
            path.write_bytes(library)
            module = tvm_ffi.load_module(path)
        function = module[KERNEL_SYMBOL]
    except (OSError, RuntimeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise BundleError(bundle.path, "library", "one that loads here", got) from error
    return CompiledKernel(tvm_ffi.Function.__call__.__get__(function))
