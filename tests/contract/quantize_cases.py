# SPDX-License-Identifier: Apache-2.0
"""The quantising ops in the contract suite; served sizes are tested apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cudnn_blocks import ops
from tests.helpers.quantize_problem import (
    QuantizeProblem,
    make_blocks,
    make_codes,
    make_fp8,
    same_numbers,
)
from tests.helpers.tensors import assert_same_bits

_MAKE: dict[str, Callable[..., QuantizeProblem]] = {
    "quantize-fp8": make_fp8,
    "quantize-mxfp8": partial(make_blocks, "mxfp8", (2, 37, 3, 96)),
    "quantize-mxfp8-tokens": partial(
        make_blocks, "mxfp8", (2, 37, 3, 40), along_tokens=True, seq_lens=[37, 33]
    ),
    "quantize-mxfp4-rows": partial(make_blocks, "mxfp4", (130, 160)),
    "quantize-nvfp4": partial(make_blocks, "nvfp4", (2, 37, 3, 80)),
    "dequantize-mxfp8": partial(make_codes, "mxfp8", (2, 37, 3, 96)),
    "dequantize-mxfp8-tokens": partial(make_codes, "mxfp8", (2, 37, 3, 48), along_tokens=True),
    "dequantize-mxfp4": partial(make_codes, "mxfp4"),
    "dequantize-nvfp4-rows": partial(make_codes, "nvfp4", (130, 80)),
}


def _result(name: str) -> str:
    """The written operand that the suite can poison: packed codes are plain bytes."""
    if name.startswith("dequantize"):
        return "y"
    return "scales" if "fp4" in name else "codes"


def _build(name: str, device: torch.device) -> dict[str, Any]:
    """Fields of a BuiltOp."""
    problem = _MAKE[name](device=device)

    def check(before: dict[str, Any], after: dict[str, Any]) -> None:
        expected = problem.with_(**before).expected()
        for written in problem.written:
            if written == "y":
                assert same_numbers(after["y"], expected["y"]).all()
            else:
                assert_same_bits(after[written], expected[written], written)

    return {
        "plan": problem.plan(),
        "operands": problem.operands,
        "mutated": frozenset(problem.written),
        "check": check,
        "result": _result(name),
        "returned": frozenset(problem.written),
    }


CASES: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    name: partial(_build, name) for name in _MAKE
}


def functional(name: str) -> Callable[[dict[str, Any]], torch.Tensor]:
    """The functional form on a case's operands."""
    knobs = _MAKE[name]().knobs

    def call(operands: dict[str, Any]) -> torch.Tensor:
        if name.startswith("dequantize"):
            return ops.dequantize_block(operands["codes"], operands["scales"], **knobs)
        if name == "quantize-fp8":
            return ops.quantize_fp8(operands["x"], **knobs)
        codes, scales = ops.quantize_block(operands["x"], seq_lens=operands["seq_lens"], **knobs)
        return {"codes": codes, "scales": scales}[_result(name)]

    return call
