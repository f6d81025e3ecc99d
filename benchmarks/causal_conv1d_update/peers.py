# SPDX-License-Identifier: Apache-2.0
"""The peers of the update, each at its best: FLA, cudnn-frontend, unfused torch."""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from benchmarks.harness.arm import Arm, Launch, Missing, Offer, Role, offer
from benchmarks.harness.timing import GraphTimer, capture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.causal_conv1d_update.problem import Buffers, Problem

FLA_TUNING_SETS = 16
"""Buffer sets in the graph that ranks FLA's tile configurations."""


def unfused_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """The update as a torch user writes it, op by op, rounded once at the end."""
    width, length = weight.shape[1], conv_state.shape[2]
    window = conv_state if slots is None else conv_state[slots]
    window = torch.cat([window, x.unsqueeze(-1)], dim=-1)
    if slots is None:
        conv_state.copy_(window[..., -length:])
    else:
        conv_state[slots] = window[..., -length:]
    acc = (window[..., -width:].float() * weight.float()).sum(-1)
    return functional.silu(acc).to(x.dtype)


def eager(*, indexed: bool, variant: str = "") -> Arm:
    """Unfused torch ops."""

    def bind(buffers: Buffers) -> Launch:
        slots = buffers.conv_state_indices if indexed else None
        return partial(unfused_update, buffers.x, buffers.conv_state, buffers.weight, slots)

    return Arm("torch-eager", Role.PEER, "unfused torch ops", bind, variant)


def cudnn_plan(sample: Buffers, *, indexed: bool, variant: str = "") -> Arm:
    """cudnn-frontend's preallocated plan, so that neither allocation nor dispatch is timed."""
    plan_type = import_module("cudnn.causal_conv1d_update_sm100")._CausalConv1dUpdatePlan
    slots = sample.conv_state_indices if indexed else None
    plan = plan_type(
        sample.x, sample.weight, sample.conv_state, sample.out, slots, None, activation="silu"
    )
    plan.check_support()
    plan.compile()

    def bind(buffers: Buffers) -> Launch:
        slots = buffers.conv_state_indices if indexed else None
        return partial(
            plan.execute, buffers.x, buffers.weight, buffers.conv_state, buffers.out, slots
        )

    return Arm("cudnn-frontend", Role.PEER, "cute-dsl plan", bind, variant)


def cudnn_functional(sample: Buffers, variant: str = "") -> Arm:
    """cudnn-frontend's public op; it allocates its output."""
    update = import_module("cudnn.ops").causal_conv1d_update
    update(sample.x, sample.conv_state, sample.weight, None, "silu")

    def bind(buffers: Buffers) -> Launch:
        return partial(update, buffers.x, buffers.conv_state, buffers.weight, None, "silu")

    return Arm("cudnn-frontend", Role.PEER, "public op", bind, variant)


def fla_gap(problem: Problem) -> str | None:
    """Why FLA's update does not apply, or None."""
    if problem.state_len != problem.width or problem.channel_last:
        have = f"L={problem.state_len} for W={problem.width}"
        return f"n/a: its cache is compact [N, D, W], this state is {have}"
    return "n/a: it has no slot indices" if problem.indexed else None


@cache
def _fla_kernel() -> tuple[Callable[..., Any], Any, tuple[Any, ...]]:
    """FLA's update function, its kernel's tuner, and all configurations of that tuner."""
    module = import_module("fla.modules.causal_conv1d.ops")
    tuner = module.causal_conv1d_update_kernel.fn
    return module.causal_conv1d_update, tuner, tuple(tuner.configs)


def fla_kernel(sets: Sequence[Buffers], timer: GraphTimer | None) -> Arm:
    """FLA's Triton update, its tile tuned for this very case.

    FLA tunes once per channel count, on the first batch it meets, with the copies that restore the
    cache inside the clock. Here each of its configurations is timed in a graph over distinct buffer
    sets and the fastest is pinned.
    """
    update, tuner, configs = _fla_kernel()

    def launch_over(buffers: Buffers) -> Launch:
        return lambda: update(
            buffers.x, buffers.conv_state, weight=buffers.weight, activation="silu"
        )[0]

    def tuned_us(config: Any) -> float:
        tuner.configs = [config]
        return timer.measure_us(
            capture([launch_over(buffers) for buffers in sets[:FLA_TUNING_SETS]]), 2
        )

    best = configs[0] if timer is None else min(configs, key=tuned_us)

    def bind(buffers: Buffers) -> Launch:
        tuner.configs = [best]
        return launch_over(buffers)

    return Arm("fla", Role.PEER, f"triton {best.kwargs}, {best.num_warps} warps", bind)


def fla_step(sample: Buffers, variant: str = "") -> Arm:
    """``ShortConvolution.step``, as FLA's layers call it, tuned by FLA itself."""
    _, tuner, configs = _fla_kernel()
    tuner.configs = list(configs)
    channels, width = sample.weight.shape
    layer = import_module("fla.modules.causal_conv1d").ShortConvolution(
        channels, width, activation="silu", device=sample.x.device, dtype=sample.x.dtype
    )
    layer.requires_grad_(requires_grad=False)

    def bind(buffers: Buffers) -> Launch:
        layer.weight.copy_(buffers.weight.unsqueeze(1))
        token = buffers.x.unsqueeze(1)
        return lambda: layer.step(token, None, buffers.conv_state)[0]

    bind(sample)()
    return Arm("fla", Role.PEER, "ShortConvolution.step", bind, variant)


def kernel_peers(
    problem: Problem, sets: Sequence[Buffers], timer: GraphTimer | None
) -> list[Offer]:
    """Every peer of a case without indices."""
    sample = sets[0]
    gap = fla_gap(problem)
    return [
        offer("cudnn-frontend", lambda: cudnn_plan(sample, indexed=False)),
        Missing("fla", gap) if gap else offer("fla", lambda: fla_kernel(sets, timer)),
        eager(indexed=False),
    ]
