# SPDX-License-Identifier: Apache-2.0
"""The arithmetic on rounds: medians, control spread, ratios. Pure Python."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True)
class Sample:
    """One arm over its rounds."""

    median_us: float
    min_us: float
    max_us: float


def summarise(rounds_us: Sequence[float]) -> Sample:
    """Median, fastest and slowest round."""
    if not rounds_us:
        raise ValueError("expected at least one round, got none")
    return Sample(statistics.median(rounds_us), min(rounds_us), max(rounds_us))


def control_spread(first_us: float, second_us: float) -> float:
    """Relative difference of one arm timed twice; smaller differences between arms are noise."""
    return abs(second_us - first_us) / min(first_us, second_us)


def ratio_to_best_peer(ours_us: float, peers_us: Iterable[float]) -> float | None:
    """Best peer's median over ours, above 1 is faster; None without a peer."""
    best_us = min(peers_us, default=None)
    return None if best_us is None else best_us / ours_us


def shuffles(keys: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """One order per round, alike in every run.

    An arm leaves clocks and power behind that the next one starts with, so none may always follow
    the same other one.
    """
    for index in range(rounds):
        order = list(keys)
        random.Random(index).shuffle(order)
        yield order
