# SPDX-License-Identifier: Apache-2.0
"""SupportReport: the answer of ``probe()``, printable as a table and dumped as JSON."""

from __future__ import annotations

import io
from typing import Any

from pydantic import BaseModel, ConfigDict, RootModel
from rich.console import Console
from rich.table import Table

_KERNEL_PREFIX = "kernel_cutlass_kernel_"
_WIDTH = 160
JSON_SCHEMA = "https://json-schema.org/draft/2020-12/schema"


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


class KernelReport(BaseModel):
    """What one compiled kernel takes."""

    model_config = ConfigDict(frozen=True)

    kernel: str
    """Its name in the device code."""
    registers: int
    """Of a thread."""
    spill_bytes: int
    """Local memory of a thread, for spilled registers and local arrays."""
    static_smem_bytes: int
    """Shared memory of a CTA beside that of its stage, which is given at the launch."""

    def __str__(self) -> str:
        return self.kernel.removeprefix(_KERNEL_PREFIX).partition("_object_at_")[0]


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
    plan: str | None = None
    """Its label, where it is one of many."""
    kernels: list[KernelReport] | None = None
    """Every kernel that it launches, where they were compiled for the report."""

    def __bool__(self) -> bool:
        return self.served

    def __str__(self) -> str:
        return render_reports([self])


class SupportReports(RootModel[list[SupportReport]]):
    """What ``python -m cudnn_blocks probe --json`` prints."""


def reports_schema() -> dict[str, Any]:
    """JSON schema of what is printed."""
    return {"$schema": JSON_SCHEMA, **SupportReports.model_json_schema()}


def dump_reports(reports: list[SupportReport]) -> str:
    """JSON of many reports."""
    return SupportReports(reports).model_dump_json(indent=2)


def render_reports(reports: list[SupportReport]) -> str:
    """One table over many reports, a row per target and stage, and one over their kernels."""
    has_plans = any(report.plan is not None for report in reports)
    header = ["op", "target", "served", "stage", "engine", "status", "workspace B", "declined"]
    table = Table(*(["plan"] * has_plans), *header)
    for report in reports:
        first = [report.plan or "-"] * has_plans + [
            report.op,
            report.target,
            "yes" if report.served else "no",
        ]
        workspace = "-" if report.workspace_bytes is None else str(report.workspace_bytes)
        if not report.stages:
            table.add_row(*first, "-", "-", "-", workspace, "-")
        for stage in report.stages:
            declined = "; ".join(
                f"{row.engine}: {row.reason}" for row in stage.engines if not row.served
            )
            cells = (stage.engine or "-", stage.status or "-", workspace, declined or "-")
            table.add_row(*first, stage.stage, *cells)
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, color_system=None)
    console.print(table)
    if any(report.kernels is not None for report in reports):
        console.print(_kernel_table(reports))
    for report in reports:
        if report.decline is not None:
            line = f"{report.plan or report.op} on {report.target} declines: {report.decline}"
            console.print(line, markup=False, soft_wrap=True)
    return text.getvalue().rstrip("\n")


def _kernel_table(reports: list[SupportReport]) -> Table:
    table = Table("plan", "target", "kernel", "registers", "spills B", "static smem B")
    for report in reports:
        for kernel in report.kernels or ():
            numbers = (kernel.registers, kernel.spill_bytes, kernel.static_smem_bytes)
            table.add_row(report.plan or report.op, report.target, str(kernel), *map(str, numbers))
    return table
