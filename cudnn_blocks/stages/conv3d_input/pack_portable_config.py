# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the packing kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudnn_blocks.target import Target

THREADS = 256


@dataclass(frozen=True)
class CausalPackConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    has_previous: bool
    threads: int
    use_pdl: bool

    @classmethod
    def from_geometry(cls, target: Target, *, history_frames: int) -> CausalPackConfig:
        """The frames of ``previous`` are dynamic: only whether there are any is compiled in."""
        return cls(has_previous=history_frames > 0, threads=THREADS, use_pdl=target.sm >= 90)


def smem_bytes(config: CausalPackConfig) -> int:
    """Shared memory of one CTA: none."""
    return 0
