# SPDX-License-Identifier: Apache-2.0
"""Cases and benches: what is measured, as data; and which of them a command line selects."""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.harness.sets import MIN_SETS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.harness.arm import Arm, Offer
    from benchmarks.harness.goals import Goal
    from benchmarks.harness.results import CompileCount, Mode, Row
    from benchmarks.harness.timing import GraphTimer


@dataclass(frozen=True)
class Lab:
    """What one run measures with."""

    rounds: int
    l2_bytes: int
    ceiling_gb_s: float | None
    """None where nothing is timed."""
    timer: GraphTimer | None
    check_only: bool = False
    peak_tflop_s: float | None = None
    """BF16 matrix product; None where nothing is timed."""
    is_sustained: bool = False
    """Every arm runs untimed for a while right before it is measured."""


@dataclass(frozen=True)
class Outcome:
    """What one case yields."""

    rows: list[Row] = field(default_factory=list)
    compile_counts: list[CompileCount] = field(default_factory=list)
    descriptions: list[str] = field(default_factory=list)
    """``describe()`` of the plans that were measured."""

    @property
    def ours_failed(self) -> bool:
        """True where one of our arms is wrong; the run then exits non-zero."""
        return any(row.status == "failed" and row.arm.startswith("ours") for row in self.rows)


class Case(ABC):
    """One line of a benchmark's grid."""

    kinds: tuple[str, ...]
    """First words its rows may carry."""
    name: str
    shape: str

    @property
    def label(self) -> str:
        """Name and shape, without the kind."""
        return f"{self.name}/{self.shape}"

    @abstractmethod
    def measure(self, lab: Lab) -> Outcome:
        """Checks, and unless the run only checks, times."""

    def plans(self) -> Sequence[Any]:
        """Plans over meta samples whose kernels are worth compiling ahead, all at once."""
        return ()


class ArmCase(Case):
    """A case whose arms work on buffer sets."""

    footprint_bytes: int
    """Distinct bytes of one buffer set."""
    traffic_bytes: int
    """Fewest bytes one launch must move: each input read once, each output written once."""
    base_variant: str | None = None
    """Variant that the overhead of the others is counted from."""
    flops: int | None = None
    """Fewest floating-point operations of one launch; None where only bytes bound it."""
    min_sets: int = MIN_SETS
    """Buffer sets that a graph walks at least."""
    family: str | None = None
    """First word of its rows where that is not ``kernel``."""
    modes: tuple[Mode, ...] = ("graph",)
    """How its arms are launched; with several, the mode is the last word of the name."""
    has_equal_bursts: bool = False
    """Every arm is launched as often in a row as the fastest one, so that clocks fall alike."""

    @abstractmethod
    def make_sets(self, count: int) -> Sequence[Any]:
        """Allocates fresh random buffer sets on the current device."""

    @abstractmethod
    def offers(self, sets: Sequence[Any], timer: GraphTimer | None) -> list[Offer]:
        """Every arm of the case, missing peers included; the timer is there to tune peers."""

    @abstractmethod
    def check(self, arm: Arm) -> str | None:
        """Compares one arm with an FP32 reference on fresh data; None, or what is wrong."""


@dataclass(frozen=True)
class Bench:
    """A named grid."""

    name: str
    cases: tuple[Case, ...]
    peer_distributions: tuple[str, ...]
    """Packages whose versions the document records."""
    goals: tuple[Goal, ...] = ()
    """What its rows have to show on the GPU they were set for."""


def _matches(pattern: str | None, candidates: Iterable[str]) -> bool:
    if pattern is None:
        return True
    glob = pattern if any(mark in pattern for mark in "*?[") else f"*{pattern}*"
    return any(fnmatch.fnmatchcase(candidate, glob) for candidate in candidates)


def select(cases: Iterable[Case], case: str | None, shape: str | None) -> list[Case]:
    """Cases whose name (with or without its kind) and shape match.

    A pattern is a glob over the whole word; without ``*``, ``?`` or ``[`` it matches anywhere.
    """
    return [
        one
        for one in cases
        if _matches(case, [one.name, *(f"{kind}/{one.name}" for kind in one.kinds)])
        and _matches(shape, [one.shape])
    ]
