# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m cudnn_blocks probe <op> ...``. It needs no GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import click
import torch

from cudnn_blocks import __version__
from cudnn_blocks.errors import ContractError
from cudnn_blocks.support import SupportReport, render_reports
from cudnn_blocks.target import CPU, Target
from cudnn_blocks.tensor_spec import TensorSpec

ALL_SERVED, SOME_DECLINE, BAD_ARGUMENTS = 0, 1, 2
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message=f"cudnn_blocks {__version__}")
def main() -> None:
    """Fused GPU operations and model blocks: what is served where."""


@main.group()
def probe() -> None:
    """Print the support table of an op; exit 0 all served, 1 a target declines, 2 bad arguments."""


@probe.command("causal-conv1d-update")
@click.option("--channels", type=int, required=True, help="D")
@click.option("--width", type=int, default=4, show_default=True, help="W")
@click.option("--state-len", type=int, default=4, show_default=True, help="L")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="bf16", show_default=True)
@click.option(
    "--state-layout",
    type=click.Choice(["compact", "channel-last"]),
    default="compact",
    show_default=True,
)
@click.option("--activation", type=click.Choice(["identity", "silu"]), default="silu")
@click.option("--bias/--no-bias", default=False, show_default=True)
@click.option("--indices/--no-indices", default=False, show_default=True)
@click.option("--on-bad-index", type=click.Choice(["trap", "report"]), default="trap")
@click.option("--target", "targets", multiple=True, help="sm_90a, cpu, ...; repeats")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table")
def probe_causal_conv1d_update(
    channels: int,
    width: int,
    state_len: int,
    dtype: str,
    state_layout: str,
    activation: str,
    bias: bool,
    indices: bool,
    on_bad_index: str,
    targets: tuple[str, ...],
    as_json: bool,
) -> None:
    """The causal conv1d decode update."""
    from cudnn_blocks.geometry import CausalConv1dGeometry
    from cudnn_blocks.ops import CausalConv1dUpdate

    def spec(*shape: int, of: torch.dtype = _DTYPES[dtype]) -> TensorSpec:
        return TensorSpec.contiguous(shape, of)

    def probe_on(target: Target) -> SupportReport:
        state = spec(1, channels, state_len)
        if state_layout == "channel-last":
            stride = (channels * state_len, 1, channels)
            state = TensorSpec(state.dtype, state.shape, stride, state.device)
        return CausalConv1dUpdate.probe(
            spec(1, channels),
            state,
            spec(channels, width),
            spec(1, channels),
            CausalConv1dGeometry(channels, width, state_len),
            sample_bias=spec(channels) if bias else None,
            sample_conv_state_indices=spec(1, of=torch.int32) if indices else None,
            activation=activation,
            on_bad_index=on_bad_index,
            target=target,
        )

    _report(probe_on, targets, as_json)


def _report(
    probe_on: Callable[[Target], SupportReport], targets: tuple[str, ...], as_json: bool
) -> None:
    """Prints one report per target and exits with the status of the worst."""
    try:
        resolved = [Target.parse(name) for name in targets] or [_this_machine()]
    except ContractError as error:
        raise click.UsageError(str(error)) from None
    reports = [probe_on(target) for target in resolved]
    for report in reports:
        if report.decline_type == ContractError.__name__:
            raise click.UsageError(str(report.decline))
    if as_json:
        click.echo(json.dumps([report.model_dump() for report in reports], indent=2))
    else:
        click.echo(render_reports(reports))
    sys.exit(ALL_SERVED if all(reports) else SOME_DECLINE)


def _this_machine() -> Target:
    return Target.of_device(torch.device("cuda")) if torch.cuda.is_available() else CPU
