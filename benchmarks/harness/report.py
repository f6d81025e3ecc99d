# SPDX-License-Identifier: Apache-2.0
"""The printed table and its summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.harness.results import Document, Row

PIPE_COLUMNS = 190
"""Width where the output is not a terminal."""


def console() -> Console:
    """A console that does not wrap the table in a pipe."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=PIPE_COLUMNS)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _share(row: Row) -> float | None:
    return None if row.achieved is None or row.ceiling is None else row.achieved / row.ceiling


def _cells(row: Row) -> list[str]:
    notes = [row.note or ""]
    if row.overhead is not None:
        notes.append(f"{row.overhead:+.1%} over base")
    if row.ratio_to_trivial_launch is not None:
        notes.append(f"{row.ratio_to_trivial_launch:.2f}x trivial launch")
    status = "" if row.status == "ok" else row.status.upper()
    return [
        row.case,
        row.arm,
        row.engine or "",
        _number(row.median_us, ".2f") or status,
        "" if row.min_us is None else f"{row.min_us:.2f}-{row.max_us:.2f}",
        _number(row.floor_us, ".2f"),
        "" if row.achieved is None else f"{row.achieved:.0f} {row.unit}",
        _number(_share(row), ".0%"),
        _number(row.control_spread, ".1%"),
        _number(row.ratio_to_best_peer, ".2f"),
        "; ".join(note for note in notes if note),
    ]


HEADINGS = (
    ("case", "left"),
    ("arm", "left"),
    ("engine", "left"),
    ("median us", "right"),
    ("min-max", "right"),
    ("floor us", "right"),
    ("rate", "right"),
    ("of ceiling", "right"),
    ("control", "right"),
    ("vs best peer", "right"),
    ("note", "left"),
)


def table(rows: Sequence[Row], title: str) -> Table:
    """One line per arm, a rule between cases."""
    grid = Table(title=title, title_justify="left")
    for heading, justify in HEADINGS:
        grid.add_column(heading, justify=justify, no_wrap=heading in {"case", "arm", "median us"})
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].case != row.case
        grid.add_row(*map(escape, _cells(row)), end_section=last)
    return grid


def slower_than_best_peer(rows: Sequence[Row]) -> list[Row]:
    """Rows whose ratio is below 1 by more than the control spread."""
    return [
        row
        for row in rows
        if row.ratio_to_best_peer is not None
        and row.ratio_to_best_peer < 1.0 - (row.control_spread or 0.0)
    ]


def summary(document: Document, worst: int = 20) -> list[str]:
    """What a reader checks first: failures, missing peers, lost rows, compile counts."""
    rows = document.rows
    rated = [row for row in rows if row.ratio_to_best_peer is not None]
    slower = sorted(slower_than_best_peer(rows), key=lambda row: row.ratio_to_best_peer or 0.0)
    failed = [row for row in rows if row.status == "failed"]
    lines = [
        f"{len(rated)} rows with a ratio; {len(slower)} below 1 by more than the control spread",
        *(
            f"  {row.case} {row.arm}: {row.ratio_to_best_peer}, control {row.control_spread:.1%}"
            for row in slower[:worst]
        ),
        *(
            f"FAILED {row.case} {row.arm}: {row.note}; no ratio is reported for it"
            for row in failed
        ),
        *(f"MISSING peer {name}: {reason}" for name, reason in document.missing_peers.items()),
    ]
    gaps: dict[str, list[str]] = {}
    for row in rows:
        if row.status == "missing":
            gaps.setdefault(f"{row.arm}: {row.note}", []).append(row.case)
    lines += [
        f"not run: {what} ({len(cases)} rows, first {cases[0]})" for what, cases in gaps.items()
    ]
    lines += [
        f"compiles {one.case}: {one.calls_one_batch_size} for one batch size, "
        f"{one.calls_sweep} for {one.batch_sizes} of them"
        for one in document.compile_counts
    ]
    lines += [
        f"{'met    ' if one.met else 'NOT MET'} {one.case}: {one.measure} "
        f"{_number(one.got, '.3f') or 'missing'}, "
        + (f"at least {one.at_least}" if one.at_most is None else f"at most {one.at_most}")
        for one in document.verdicts
    ]
    return lines
