# SPDX-License-Identifier: Apache-2.0
"""DequantGemm in the contract suite; served sizes are tested apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cudnn_blocks import ops
from tests.helpers.dequant_gemm_problem import DequantGemmProblem, make_dequant_gemm

_MAKE: dict[str, Callable[..., DequantGemmProblem]] = {
    "dequant-gemm-mxfp4": partial(make_dequant_gemm, "mxfp4", (2, 5, 264, 160), pads=(8, 16)),
    "dequant-gemm-nvfp4-coded-x": partial(
        make_dequant_gemm, "nvfp4", (2, 67, 136, 96), x_format="nvfp4"
    ),
    "dequant-gemm-mxfp8": partial(make_dequant_gemm, "mxfp8", (3, 67, 136, 96)),
}


def _build(name: str, device: torch.device) -> dict[str, Any]:
    """Fields of a BuiltOp."""
    problem = _MAKE[name](device=device)

    def check(before: dict[str, Any], after: dict[str, Any]) -> None:
        assert torch.equal(after["y"], problem.with_(**before).expected())

    return {
        "plan": problem.plan(),
        "operands": problem.operands,
        "mutated": frozenset({"y"}),
        "check": check,
        "result": "y",
        "returned": frozenset({"y"}),
    }


CASES: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    name: partial(_build, name) for name in _MAKE
}


def functional(name: str) -> Callable[[dict[str, Any]], torch.Tensor]:
    """The functional form on a case's operands."""
    problem = _MAKE[name]()

    def call(operands: dict[str, Any]) -> torch.Tensor:
        given = {key: value for key, value in operands.items() if key != "y"}
        options = {"w_format": problem.w_format, "x_format": problem.x_format}
        return ops.dequant_gemm(**given, **options, alpha=problem.alpha)

    return call
