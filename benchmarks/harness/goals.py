# SPDX-License-Identifier: Apache-2.0
"""What a benchmark's rows have to show, as data, and what they showed."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.harness.results import Measure, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.harness.results import Row


@dataclass(frozen=True)
class Goal:
    """A bound for our default arm in every case that a pattern matches."""

    case: str
    """Glob over a row's case."""
    bound: float
    measure: Measure = "ratio"
    """What is bounded: from below for ``ratio`` and ``share``, else from above."""
    forgives_spread: bool = False
    """The control spread of the row loosens the bound."""
    arm: str = "ours"

    @property
    def is_upper(self) -> bool:
        """True where less is better."""
        return self.measure in ("overhead", "launches")


def verdicts(goals: Iterable[Goal], rows: Sequence[Row], *, is_whole: bool) -> list[Verdict]:
    """One verdict per goal and row.

    A goal that matches no row is unmet if the run was whole, and passed over if it was not.
    """
    found = []
    for goal in goals:
        matching = [
            row for row in rows if row.arm == goal.arm and fnmatch.fnmatchcase(row.case, goal.case)
        ]
        found += [_verdict(goal, row) for row in matching]
        if is_whole and not matching:
            found.append(
                Verdict(
                    case=goal.case,
                    measure=goal.measure,
                    got=None,
                    met=False,
                    **_bound(goal, goal.bound),
                )
            )
    return found


def _verdict(goal: Goal, row: Row) -> Verdict:
    got = _got(goal.measure, row)
    spread = (row.control_spread or 0.0) if goal.forgives_spread else 0.0
    bound = goal.bound + spread if goal.is_upper else goal.bound - spread
    return Verdict(
        case=row.case,
        measure=goal.measure,
        got=None if got is None else round(got, 4),
        met=got is not None and (got <= bound if goal.is_upper else got >= bound),
        **_bound(goal, round(bound, 4)),
    )


def _got(measure: Measure, row: Row) -> float | None:
    if measure == "share":
        has_both = row.achieved is not None and row.ceiling is not None
        return row.achieved / row.ceiling if has_both else None
    fields = {
        "ratio": row.ratio_to_best_peer,
        "overhead": row.overhead,
        "launches": row.ratio_to_trivial_launch,
    }
    return fields[measure]


def _bound(goal: Goal, bound: float) -> dict[str, float]:
    return {"at_most" if goal.is_upper else "at_least": bound}
