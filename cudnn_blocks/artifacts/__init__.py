# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels that outlive their process: the disk cache, bundles, warm-up."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudnn_blocks.artifacts.bundle import BUNDLE_VARIABLE, Bundle, load_bundle
    from cudnn_blocks.artifacts.bundle_build import build_bundle
    from cudnn_blocks.artifacts.disk import DiskCache, DiskCacheStats
    from cudnn_blocks.artifacts.location import CACHE_VARIABLE, disk_cache
    from cudnn_blocks.artifacts.manifest import BundleManifest
    from cudnn_blocks.artifacts.refusal import refuse_compiles

__all__ = [
    "BUNDLE_VARIABLE",
    "CACHE_VARIABLE",
    "Bundle",
    "BundleManifest",
    "DiskCache",
    "DiskCacheStats",
    "build_bundle",
    "disk_cache",
    "load_bundle",
    "refuse_compiles",
]

_HOMES = {
    "BUNDLE_VARIABLE": "bundle",
    "Bundle": "bundle",
    "BundleManifest": "manifest",
    "DiskCache": "disk",
    "DiskCacheStats": "disk",
    "build_bundle": "bundle_build",
    "load_bundle": "bundle",
    "refuse_compiles": "refusal",
}


def __getattr__(name: str) -> object:
    # The stages import this package for its keys; the rest is for those who miss a kernel.
    if name not in __all__:
        raise AttributeError(f"module 'cudnn_blocks.artifacts' has no attribute {name!r}")
    home = importlib.import_module(f"cudnn_blocks.artifacts.{_HOMES.get(name, 'location')}")
    return getattr(home, name)
