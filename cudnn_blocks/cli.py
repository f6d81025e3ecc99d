# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m cudnn_blocks probe <op> ...``. It needs no GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import click
import torch

from cudnn_blocks import __version__
from cudnn_blocks.cli_cache import cache
from cudnn_blocks.errors import ContractError
from cudnn_blocks.operands import ACTIVATION_DTYPES
from cudnn_blocks.support import SupportReport, render_reports
from cudnn_blocks.target import CPU, Target
from cudnn_blocks.tensor_spec import TensorSpec

ALL_SERVED, SOME_DECLINE, BAD_ARGUMENTS = 0, 1, 2
_DTYPES = {name: dtype for dtype, name in ACTIVATION_DTYPES.items()}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message=f"cudnn_blocks {__version__}")
def main() -> None:
    """Fused GPU operations and model blocks: what is served where."""


main.add_command(cache)


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


@probe.command("gated-attention-block")
@click.option("--d-model", type=int, required=True)
@click.option("--h-q", type=int, required=True, help="query heads")
@click.option("--h-kv", type=int, required=True, help="key and value heads")
@click.option("--d-head", type=int, default=256, show_default=True)
@click.option("--rope-dim", type=int, default=64, show_default=True)
@click.option("--batch", type=int, default=1, show_default=True, help="largest B")
@click.option("--tokens", type=int, default=8192, show_default=True, help="largest S")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="bf16", show_default=True)
@click.option("--qk-norm/--no-qk-norm", default=True, show_default=True)
@click.option("--causal/--no-causal", "is_causal", default=True, show_default=True)
@click.option("--bottom-right", "causal_bottom_right", is_flag=True, help="causal to the last key")
@click.option("--window-left", type=int, default=-1, show_default=True)
@click.option("--window-right", type=int, default=-1, show_default=True)
@click.option("--seq-lens", "seq_lens_present", is_flag=True, help="a length per batch entry")
@click.option("--lse", "return_lse", is_flag=True, help="return the log-sum-exp")
@click.option("--fuse-norm-rope", is_flag=True)
@click.option("--fuse-gate", is_flag=True)
@click.option(
    "--engine", "pins", multiple=True, help="stage=engine, such as sdpa=portable; repeats"
)
@click.option("--target", "targets", multiple=True, help="sm_90a, cpu, ...; repeats")
@click.option("--json", "as_json", is_flag=True, help="JSON instead of a table")
def probe_gated_attention_block(
    batch: int,
    tokens: int,
    dtype: str,
    pins: tuple[str, ...],
    targets: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """The gated attention block."""
    from cudnn_blocks.blocks import GatedAttentionBlockFwd
    from cudnn_blocks.geometry import GatedAttentionGeometry

    knobs = ("seq_lens_present", "return_lse", "fuse_norm_rope", "fuse_gate")
    chosen = {name: options.pop(name) for name in knobs}
    geometry = GatedAttentionGeometry(**options)
    malformed = [pin for pin in pins if pin.count("=") != 1]
    if malformed:
        raise click.UsageError(f"--engine: expected stage=engine, got {malformed[0]}")
    chosen["engines"] = dict(pin.split("=") for pin in pins)

    def spec(*shape: int) -> TensorSpec:
        return TensorSpec.contiguous(shape, _DTYPES[dtype])

    hidden = spec(batch, tokens, geometry.d_model)
    norm = spec(geometry.d_head) if geometry.qk_norm else None
    table = spec(batch, tokens, geometry.rope_dim) if geometry.rope_dim else None

    def probe_on(target: Target) -> SupportReport:
        return GatedAttentionBlockFwd.probe(
            hidden,
            spec(geometry.n_qkvg, geometry.d_model),
            norm,
            norm,
            table,
            table,
            spec(geometry.d_model, geometry.attn_width),
            hidden,
            geometry,
            target=target,
            **chosen,
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
