# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels that outlive their process: the disk cache, and filling it before traffic."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudnn_blocks.artifacts.disk import DiskCache, DiskCacheStats
    from cudnn_blocks.artifacts.location import CACHE_VARIABLE, disk_cache

__all__ = ["CACHE_VARIABLE", "DiskCache", "DiskCacheStats", "disk_cache"]

_HOMES = {"DiskCache": "disk", "DiskCacheStats": "disk"}


def __getattr__(name: str) -> object:
    # The stages import this package for its keys; the rest is for those who miss a kernel.
    if name not in __all__:
        raise AttributeError(f"module 'cudnn_blocks.artifacts' has no attribute {name!r}")
    home = importlib.import_module(f"cudnn_blocks.artifacts.{_HOMES.get(name, 'location')}")
    return getattr(home, name)
