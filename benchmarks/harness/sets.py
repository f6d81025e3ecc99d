# SPDX-License-Identifier: Apache-2.0
"""How many distinct buffer sets one CUDA graph walks, and what the row is called for it."""

from __future__ import annotations

from dataclasses import dataclass

MIN_SETS = 30
MIN_LARGE_SETS = 3
"""For cases whose sets are all about as large as the L2, or far larger."""
MAX_SETS = 2048
LATENCY_SETS = 256
L2_MULTIPLE = 4


@dataclass(frozen=True)
class SetPlan:
    """The buffer sets of one case."""

    count: int
    is_cold: bool
    """True where the sets outgrow the L2, so that every launch reads memory."""

    @property
    def kind(self) -> str:
        """First word of the row's case: ``kernel`` when cold, ``latency`` when in the L2."""
        return "kernel" if self.is_cold else "latency"


def plan_sets(footprint_bytes: int, l2_bytes: int, min_sets: int = MIN_SETS) -> SetPlan:
    """Sizes the rotation: at least ``min_sets`` and 4x the L2 in total, else a latency row.

    Args:
        footprint_bytes: distinct bytes of one set, each byte counted once.
        l2_bytes: the device's L2 capacity.
        min_sets: 30, or ``MIN_LARGE_SETS``.
    """
    if footprint_bytes < 1 or l2_bytes < 1:
        raise ValueError(f"expected positive byte counts, got {footprint_bytes} and {l2_bytes}")
    count = max(min_sets, -(-L2_MULTIPLE * l2_bytes // footprint_bytes))
    if count > MAX_SETS:
        return SetPlan(LATENCY_SETS, is_cold=False)
    return SetPlan(count, is_cold=True)
