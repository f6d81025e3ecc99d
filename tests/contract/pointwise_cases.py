# SPDX-License-Identifier: Apache-2.0
"""QK norm + RoPE and the sigmoid gate in the contract suite; served sizes are tested apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cudnn_blocks import ops
from tests.helpers.pointwise_problem import (
    GateProblem,
    QkProblem,
    assert_close,
    assert_heads,
    make_gate,
    make_qk,
)
from tests.helpers.tensors import assert_same_bits

FP16 = torch.float16
_QK: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "qk-norm-rope-slab": (((2, 37, 16, 2, 256), 64), {}),
    "qk-norm-rope-odd-pairs-fp16": (((3, 5, 3, 1, 40), 12), {"dtype": FP16, "in_slab": False}),
    "qk-rope-alone": (((2, 9, 4, 2, 64), 16), {"has_norm": False}),
    "qk-norm-alone": (((1, 33, 5, 1, 128), 0), {}),
}
_GATE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "sigmoid-gate": (((2, 37, 16, 256),), {}),
    "sigmoid-gate-odd-fp16": (((3, 5, 3, 40),), {"dtype": FP16}),
}
IN_PLACE = frozenset(_QK)
"""Cases whose results are what they read, so that no garbage may be there before."""


def _build_qk(name: str, device: torch.device) -> dict[str, Any]:
    """Fields of a BuiltOp."""
    arguments, options = _QK[name]
    torch.manual_seed(3)
    problem = make_qk(*arguments, device=device, **options)

    def check(before: dict[str, Any], after: dict[str, Any]) -> None:
        assert_heads(QkProblem(after), QkProblem(before).expected())

    return {
        "plan": problem.plan(),
        "operands": problem.operands,
        "mutated": frozenset({"q", "k"}),
        "check": check,
        "result": "q",
        "returned": frozenset(),
    }


def _build_gate(name: str, device: torch.device) -> dict[str, Any]:
    arguments, options = _GATE[name]
    torch.manual_seed(3)
    problem = make_gate(*arguments, device=device, **options)
    b, s, h, d = problem["o"].shape
    wide = torch.empty(b, s, h * d + 8, dtype=problem["o"].dtype, device=device)
    problem = problem.with_(out=wide[..., : h * d].unflatten(-1, (h, d)))

    def check(before: dict[str, Any], after: dict[str, Any]) -> None:
        same = assert_same_bits if device.type == "cpu" else assert_close
        same(after["out"], GateProblem(before).expected(), "out")

    return {
        "plan": problem.plan(),
        "operands": problem.operands,
        "mutated": frozenset({"out"}),
        "check": check,
    }


CASES: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    **{name: partial(_build_qk, name) for name in _QK},
    **{name: partial(_build_gate, name) for name in _GATE},
}


def functional(name: str) -> Callable[[dict[str, Any]], torch.Tensor]:
    """The functional form on a case's operands."""
    if name in _GATE:
        return lambda operands: ops.sigmoid_gate(operands["o"], operands["gate"])

    def call(operands: dict[str, Any]) -> torch.Tensor:
        ops.qk_norm_rope(**operands)
        return operands["q"]

    return call
