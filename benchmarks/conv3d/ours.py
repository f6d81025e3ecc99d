# SPDX-License-Identifier: Apache-2.0
"""Our arms: each engine by name, plans called bare."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness.arm import Arm, Launch, Role, own
from cudnn_blocks import (
    CausalConv3dWithCache,
    Conv3dRaw,
    Conv3dRmsNormSiluPad,
    RmsNormSiluPad,
)
from cudnn_blocks.geometry.conv3d import MAX_HISTORY_FRAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.conv3d.problem import Conv3dProblem, Tensors

HOPPER = (9, 0)
VECTOR = torch.complex128
"""Sixteen bytes: what a copy of history moves at a time."""


@dataclass(frozen=True)
class Engine:
    """An engine and the arm that stands for it."""

    name: str
    arm: str = "ours"
    role: Role = Role.OURS


def engines_of(device: str, *, every: bool) -> tuple[Engine, ...]:
    """The engine that serves a device best, and on request the others that run there."""
    if device == "cpu":
        return (Engine("reference"),)
    if torch.cuda.get_device_capability() != HOPPER:
        return (Engine("portable"),)
    others = (Engine("portable", "ours-portable", Role.ENGINE),) if every else ()
    return (Engine("hopper"), *others)


def arms(
    build: Callable[[Tensors, Engine], Arm], sample: Tensors, device: str, *, every: bool
) -> list[Arm]:
    """One arm per engine; one that cannot be built fails its check."""
    return [
        own(engine.arm, partial(build, sample, engine))
        for engine in engines_of(device, every=every)
    ]


def conv3d_plans(
    problem: Conv3dProblem,
    sample: Tensors,
    engine: str,
    *,
    hinted: bool = False,
    target: Any = None,
) -> tuple[Any, ...]:
    """The unchecked plans of one launch, in order.

    Args:
        problem: the layer.
        sample: one of its buffer sets, on ``meta`` where ``target`` is given.
        engine: of the convolution.
        hinted: tell the op of the leading planes that are zero.
        target: what to compile for; None for the sample's device.
    """
    x, packed_weight = sample["input"], sample["packed_weight"]
    pins = {"engines": {"conv3d": engine}, "target": target}
    pins["zero_leading_frames"] = problem.zero_leading_frames if hinted else 0
    if not problem.is_fused:
        return (Conv3dRaw(x, packed_weight, sample["output"], **pins),)
    names = ("bias", "gamma", "padded_output", "cache_output")
    bias, gamma, padded, cache = (sample[name] for name in names)
    residual, value = sample.get("residual"), sample.get("residual_output")
    if problem.is_one_op:
        return (
            Conv3dRmsNormSiluPad(
                x,
                packed_weight,
                bias,
                gamma,
                padded,
                cache,
                problem.history_frames,
                residual,
                None,
                value,
                **pins,
            ),
        )
    output = sample["output"]
    norm = RmsNormSiluPad(
        output, gamma, padded, cache, bias, sample.get("history"), residual, None, value,
        target=target,
    )  # fmt: skip
    return Conv3dRaw(x, packed_weight, output, **pins), norm


def conv3d_arm(
    problem: Conv3dProblem,
    sample: Tensors,
    engine: Engine,
    *,
    hinted: bool = False,
    copies_history: bool = True,
) -> Arm:
    """A layer on one engine.

    Args:
        problem: the layer.
        sample: fixes the extents.
        engine: of the convolution.
        hinted: tell the op of the leading planes that are zero.
        copies_history: do what the op leaves to its caller; False times the op alone.
    """
    plans = conv3d_plans(problem, sample, engine.name, hinted=hinted)
    for plan in plans:
        plan.compile()
    copies_history = copies_history and problem.is_one_op and problem.history_frames > 0

    def bind(buffers: Tensors) -> Launch:
        work = [_execute(plan, buffers) for plan in plans]
        if copies_history:
            work = [*history_copies(buffers), *work]
        return work[0] if len(work) == 1 else partial(_in_turn, work)

    return Arm(
        engine.arm,
        engine.role,
        ", ".join([_engines_of(plans), *(["history by torch copies"] * copies_history)]),
        bind,
        description="\n".join(plan.describe() for plan in plans),
    )


def history_copies(buffers: Tensors) -> list[Launch]:
    """What a caller does beside ``Conv3dRmsNormSiluPad``: history into its places, once each."""
    history, padded, cache = (buffers[n] for n in ("history", "padded_output", "cache_output"))
    frames = history.shape[1]
    planes = padded[:, MAX_HISTORY_FRAMES - frames : MAX_HISTORY_FRAMES, 1:-1, 1:-1]
    copies = [_copy(planes, history)]
    older = cache.shape[1] - min(MAX_HISTORY_FRAMES, padded.shape[1] - MAX_HISTORY_FRAMES)
    if older:
        copies.append(_copy(cache[:, :older], history[:, frames - older :]))
    return copies


def causal_plan(sample: Tensors, engine: str, target: Any = None) -> CausalConv3dWithCache:
    """The unchecked plan of the streaming layer."""
    return CausalConv3dWithCache(
        *(sample.get(name) for name in CausalConv3dWithCache.operand_names),
        target=target,
        engines={"causal_conv3d": engine},
    )


def causal_arm(sample: Tensors, engine: Engine) -> Arm:
    """The streaming layer on one engine, packing included."""
    plan = causal_plan(sample, engine.name)
    plan.compile()
    return Arm(
        engine.arm,
        engine.role,
        _engines_of((plan,)),
        partial(_execute, plan),
        description=plan.describe(),
    )


def _execute(plan: Any, buffers: Tensors) -> Launch:
    """Operands by name, but for the norm, whose input is the convolution's output."""
    named = dict(buffers)
    if isinstance(plan, RmsNormSiluPad):
        named |= {"input": buffers["output"], "input_bias": buffers["bias"]}
        named["previous"] = buffers.get("history")
    return partial(plan.execute, *(named.get(name) for name in plan.operand_names))


def _copy(target: torch.Tensor, source: torch.Tensor) -> Launch:
    return partial(target.view(VECTOR).copy_, source.view(VECTOR))


def _in_turn(work: list[Launch]) -> None:
    for launch in work:
        launch()


def _engines_of(plans: tuple[Any, ...]) -> str:
    return " + ".join(str(stage.engine) for plan in plans for stage in plan.probe().stages)
