# SPDX-License-Identifier: Apache-2.0
"""SupportReport: the answer of ``probe()``, printable as a table and dumped as JSON."""

from __future__ import annotations

import io

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.table import Table


class EngineReport(BaseModel):
    """One engine of a stage and what it says to the request."""

    model_config = ConfigDict(frozen=True)

    engine: str
    served: bool
    reason: str | None
    """Why it declines; None where it serves."""
    status: str | None
    """``run: <evidence file>`` or ``compile-only``; None where the target is not the engine's."""


class StageReport(BaseModel):
    """One stage: the engine chosen, and every engine with its reason."""

    model_config = ConfigDict(frozen=True)

    stage: str
    engine: str | None
    """The engine chosen; None where every one declines."""
    status: str | None
    smem_bytes: int | None
    """Shared memory of one CTA of the chosen engine's largest kernel; None where none is chosen."""
    engines: list[EngineReport]


class SupportReport(BaseModel):
    """Whether an op is served on a target, by which engines, with how much workspace."""

    model_config = ConfigDict(frozen=True)

    op: str
    target: str
    served: bool
    decline: str | None
    """The message that ``check_support()`` raises; None where the op is served."""
    decline_type: str | None
    """Its type: ContractError or NotServedError."""
    workspace_bytes: int | None
    stages: list[StageReport]

    def __bool__(self) -> bool:
        return self.served

    def __str__(self) -> str:
        return render_reports([self])


def render_reports(reports: list[SupportReport]) -> str:
    """One table over many reports, a row per target and stage."""
    table = Table("op", "target", "served", "stage", "engine", "status", "workspace B", "declined")
    for report in reports:
        served = "yes" if report.served else "no"
        workspace = "-" if report.workspace_bytes is None else str(report.workspace_bytes)
        if not report.stages:
            table.add_row(report.op, report.target, served, "-", "-", "-", workspace, "-")
        for stage in report.stages:
            declined = [row for row in stage.engines if not row.served]
            table.add_row(
                report.op,
                report.target,
                served,
                stage.stage,
                stage.engine or "-",
                stage.status or "-",
                workspace,
                "; ".join(f"{row.engine}: {row.reason}" for row in declined) or "-",
            )
    text = io.StringIO()
    console = Console(file=text, width=160, color_system=None)
    console.print(table)
    for report in reports:
        if report.decline is not None:
            line = f"{report.op} on {report.target} declines: {report.decline}"
            console.print(line, markup=False, soft_wrap=True)
    return text.getvalue().rstrip("\n")
