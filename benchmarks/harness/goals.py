# SPDX-License-Identifier: Apache-2.0
"""What a benchmark's rows have to show, as data, and what they showed."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from benchmarks.harness.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from benchmarks.harness.results import Row


@dataclass(frozen=True)
class Goal:
    """A bound for our default arm in every case that a pattern matches."""

    case: str
    """Glob over a row's case."""
    at_least: float
    measure: Literal["ratio", "share"] = "ratio"
    """``ratio_to_best_peer``, or ``achieved`` over ``ceiling``."""
    forgives_spread: bool = False
    """The control spread of the row is taken off the bound."""
    arm: str = "ours"


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
                    at_least=goal.at_least,
                    got=None,
                    met=False,
                )
            )
    return found


def _verdict(goal: Goal, row: Row) -> Verdict:
    got = row.ratio_to_best_peer
    if goal.measure == "share":
        has_both = row.achieved is not None and row.ceiling is not None
        got = row.achieved / row.ceiling if has_both else None
    spread = (row.control_spread or 0.0) if goal.forgives_spread else 0.0
    return Verdict(
        case=row.case,
        measure=goal.measure,
        at_least=round(goal.at_least - spread, 4),
        got=None if got is None else round(got, 4),
        met=got is not None and got >= goal.at_least - spread,
    )
