# SPDX-License-Identifier: Apache-2.0
"""The causal conv1d update in the contract suite."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cudnn_blocks import ContractError, NotServedError, ops
from cudnn_blocks.stages.conv1d.stage import CausalConv1dUpdateStage
from tests.helpers.conv1d_problem import (
    STATE_FORMS,
    ConvProblem,
    assert_matches,
    expect,
    make_problem,
)

STAGE = CausalConv1dUpdateStage
MUTATED = frozenset({"conv_state", "out", "status"})


def _problem_of(operands: dict[str, Any], activation: str | None, on_bad_index: str) -> ConvProblem:
    given = dict(operands)
    return ConvProblem(
        indices=given.pop("conv_state_indices"),
        activation=activation,
        on_bad_index=on_bad_index,
        **given,
    )


def _build(
    arguments: tuple[Any, ...],
    knobs: dict[str, Any],
    device: torch.device | str,
    target: str | None = None,
) -> tuple[Any, ...]:
    """Positional fields of a BuiltOp."""
    torch.manual_seed(3)
    is_meta = str(device) == "meta"
    problem = make_problem(*arguments, device="cpu" if is_meta else device, **knobs)
    activation, on_bad_index = problem.activation, problem.on_bad_index
    operands = problem.operands
    if is_meta:
        metas = {n: None if t is None else t.to("meta") for n, t in operands.items()}
        problem = _problem_of(metas, activation, on_bad_index)

    def check(before: dict[str, Any], after: dict[str, Any]) -> None:
        expected = expect(_problem_of(before, activation, on_bad_index))
        assert_matches(_problem_of(after, activation, on_bad_index), expected)

    return problem.plan(target=target), operands, MUTATED, check


_ROUTED = {"indices": [6, -1, 0, 3, 9], "num_slots": 12}
_CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "conv1d-l4-silu": ((64, 2048), {"activation": "silu"}),
    "conv1d-l3-channel-last-bias": (
        (5, 520, 4, 3, "channel_last"),
        {"has_bias": True, "activation": "silu"},
    ),
    "conv1d-w2-odd-channels-fp16": ((3, 521, 2, 1), {"dtype": torch.float16}),
    "conv1d-padded-rows": ((7, 1000), {"pitch": 1024, "has_bias": True}),
    "conv1d-routed-trap": ((5, 1024), {**_ROUTED, "activation": "silu"}),
    "conv1d-routed-report": (
        (5, 1024, 4, 3),
        {"indices": [6, -1, 0, 6, 99], "num_slots": 12, "on_bad_index": "report"},
    ),
}
CASES: dict[str, Callable[..., tuple[Any, ...]]] = {
    name: partial(_build, *arguments) for name, arguments in _CASES.items()
}

PASSING: dict[str, Callable[..., tuple[Any, ...]]] = {
    f"W={width} L={state_len} {layout} {str(dtype).removeprefix('torch.')}": partial(
        _build, (5, 72, width, state_len, layout), {"dtype": dtype}
    )
    for (width, state_len, layout), dtype in itertools.product(
        STATE_FORMS, (torch.bfloat16, torch.float16)
    )
}
"""Every value of every fact of the capabilities rows."""


def functional(name: str) -> Callable[[dict[str, Any]], torch.Tensor] | None:
    """The functional form on a case's operands; it has no report mode."""
    _, knobs = _CASES[name]
    if knobs.get("on_bad_index") == "report":
        return None

    def call(operands: dict[str, Any]) -> torch.Tensor:
        return ops.causal_conv1d_update(
            operands["x"],
            operands["conv_state"],
            operands["weight"],
            operands["bias"],
            knobs.get("activation"),
            conv_state_indices=operands["conv_state_indices"],
        )

    return call


def _plan(target: str, **knobs: Any) -> Any:
    return _build((5, 72), knobs, "meta", target)[0]


NEIGHBOURS = (
    {
        "name": "width 1",
        "fact": "width",
        "build": partial(_plan, width=1, state_len=1),
        "error": NotServedError,
        "match": r"width=1 \(served: 2, 3, 4\)",
    },
    {
        "name": "width 5",
        "fact": "width",
        "build": partial(_plan, width=5, state_len=4),
        "error": NotServedError,
        "match": r"width=5 \(served: 2, 3, 4\)",
    },
    {
        "name": "two spare tokens",
        "fact": "spare_tokens",
        "build": partial(_plan, width=4, state_len=5),
        "error": NotServedError,
        "match": r"spare_tokens=2 \(served: 0, 1\)",
    },
    {
        "name": "a state one token short",
        "fact": "spare_tokens",
        "build": partial(_plan, width=4, state_len=2),
        "error": ContractError,
        "match": "state_len: expected at least width - 1 = 3, got 2",
    },
    {
        "name": "fp32",
        "fact": "dtype",
        "build": partial(_plan, dtype=torch.float32),
        "error": ContractError,
        "match": r"x: expected dtype torch\.bfloat16 or torch\.float16, got torch\.float32",
    },
)
