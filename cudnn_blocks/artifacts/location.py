# SPDX-License-Identifier: Apache-2.0
"""Where the disk cache of this process is: the user's cache folder, moved by one variable."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import platformdirs

from cudnn_blocks.artifacts.disk import DiskCache

CACHE_VARIABLE = "CUDNN_BLOCKS_CACHE_DIR"
"""A folder for the cache; ``off`` or nothing at all disables it."""
_DISABLED = ("", "off")
_KERNELS = "kernels-1"
"""Folder of the entries; the number is that of their layout."""


def disk_cache() -> DiskCache | None:
    """The disk cache that the environment asks for; None where it is disabled."""
    asked = os.environ.get(CACHE_VARIABLE)
    if asked is not None and asked.strip().lower() in _DISABLED:
        return None
    if asked is None:
        parent = platformdirs.user_cache_path("cudnn_blocks", appauthor=False)
    else:
        parent = Path(asked).expanduser().absolute()
    # A user without a home folder has a relative one, which is nobody's cache.
    return cache_under(parent) if parent.is_absolute() else None


@functools.cache
def cache_under(parent: Path) -> DiskCache:
    """The cache in a folder; one object each, so that a folder is complained of once."""
    return DiskCache(parent / _KERNELS)
