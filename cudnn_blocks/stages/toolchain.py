# SPDX-License-Identifier: Apache-2.0
"""The CuTe DSL at hand: its version, read without importing it."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from dataclasses import dataclass

DSL_DISTRIBUTION = "nvidia-cutlass-dsl"


@functools.cache
def dsl_version() -> str | None:
    """Version of the installed CuTe DSL, or None."""
    try:
        return importlib.metadata.version(DSL_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class DslRequirement:
    """At least this CuTe DSL release."""

    minimum: tuple[int, int, int]

    def decline(self) -> str | None:
        """Why the DSL at hand does not do; None where it does."""
        found = dsl_version() or _bundled_dsl_version()
        if found is not None and _release(found) >= self.minimum:
            return None
        wanted = ".".join(str(part) for part in self.minimum)
        return f"{DSL_DISTRIBUTION} {found or 'not installed'} (served: {wanted} and up)"


def _bundled_dsl_version() -> str | None:
    """Version that made the kernels at hand, where bundles stand in for a DSL."""
    from cudnn_blocks.artifacts.bundle import loaded_bundles

    versions = (bundle.manifest.versions.get(DSL_DISTRIBUTION) for bundle in loaded_bundles())
    return next((version for version in versions if version is not None), None)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
