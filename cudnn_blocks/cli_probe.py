# SPDX-License-Identifier: Apache-2.0
"""``python -m cudnn_blocks probe``: one op from options, or many from a deploy file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

from cudnn_blocks.api_base import APIBase
from cudnn_blocks.artifacts.usage import kernel_usage
from cudnn_blocks.cli_options import command_of
from cudnn_blocks.deploy import REQUESTS, DeployFile, Request, read_deploy_file
from cudnn_blocks.errors import ContractError, DriverError
from cudnn_blocks.support import SupportReport, dump_reports, render_reports
from cudnn_blocks.target import CPU, Target

ALL_SERVED, SOME_DECLINE, BAD_ARGUMENTS = 0, 1, 2
_BROKEN_CONTRACT = ContractError.__name__


def _output_options() -> list[click.Option]:
    return [
        click.Option(["--target", "targets"], multiple=True, help="sm_90a, cpu, ...; repeats"),
        click.Option(["--json", "as_json"], is_flag=True, help="JSON instead of a table"),
        click.Option(
            ["--compile", "compiles"],
            is_flag=True,
            help="compile the kernels: registers, spills and shared memory of each",
        ),
    ]


def _probe_file(context: click.Context, path: Path | None, **output: Any) -> None:
    if context.invoked_subcommand is not None:
        return
    if path is None:
        raise click.UsageError("name an op, or a deploy file with --file")
    deploy = load_deploy_file(path)
    output["targets"] = output["targets"] or deploy.targets
    _report(list(zip(deploy.labels(), deploy.plans, strict=True)), output)


probe = click.Group(
    "probe",
    params=[
        click.Option(
            ["--file", "path"],
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="a deploy file: many configurations at once",
        ),
        *_output_options(),
    ],
    callback=click.pass_context(_probe_file),
    invoke_without_command=True,
    help="Print the support table of ops; exit 0 all served, 1 any declines, 2 bad file or "
    "bad arguments.",
)


def load_deploy_file(path: Path) -> DeployFile:
    """The deploy file; what is wrong with it is a usage error, which exits 2."""
    try:
        return read_deploy_file(path)
    except (ContractError, OSError) as error:
        raise click.UsageError(f"{path}: {error}") from None


def parse_targets(names: Sequence[str]) -> list[Target]:
    """Targets by name; this machine where there is none."""
    try:
        return [Target.parse(name) for name in names] or [_this_machine()]
    except ContractError as error:
        raise click.UsageError(str(error)) from None


def plan_of(request: Request, target: Target, label: str) -> APIBase:
    """The plan of a request; what is wrong with it is a usage error, which exits 2."""
    try:
        return request.plan(target)
    except (ContractError, TypeError) as error:
        raise click.UsageError(f"{label}: {error}") from None


def _report(requests: Sequence[tuple[str | None, Request]], output: dict[str, Any]) -> None:
    """Prints one report per plan and target and exits with the status of the worst."""
    reports = [
        _probe(request, target, label, output["compiles"])
        for label, request in requests
        for target in parse_targets(output["targets"])
    ]
    for report in reports:
        if report.decline_type == _BROKEN_CONTRACT:
            raise click.UsageError(": ".join(filter(None, (report.plan, report.decline))))
    click.echo(dump_reports(reports) if output["as_json"] else render_reports(reports))
    sys.exit(ALL_SERVED if all(reports) else SOME_DECLINE)


def _probe(request: Request, target: Target, label: str | None, compiles: bool) -> SupportReport:
    plan = plan_of(request, target, label or str(request))
    report = plan.probe()
    kernels = None
    if compiles and report.served:
        try:
            kernels = kernel_usage(plan)
        except DriverError as error:
            raise click.ClickException(f"{label or request}: {error}") from None
    return report.model_copy(update={"plan": label, "kernels": kernels})


def _this_machine() -> Target:
    return Target.of_device(torch.device("cuda")) if torch.cuda.is_available() else CPU


def _run(request: Request, output: dict[str, Any]) -> None:
    _report([(request.name, request)], output)


for _request in REQUESTS:
    probe.add_command(command_of(_request, _run, _output_options()))
