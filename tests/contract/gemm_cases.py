# SPDX-License-Identifier: Apache-2.0
"""Gemm and QkvGateProjection in the contract suite; served sizes are tested apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cudnn_blocks import GatedAttentionGeometry, ops
from tests.helpers.gemm_problem import GemmProblem, make_gemm, make_projection

FP16 = torch.float16
_NEXT = GatedAttentionGeometry(d_model=128, h_q=4, h_kv=1, d_head=256, rope_dim=64)
_SMALL = GatedAttentionGeometry(d_model=72, h_q=4, h_kv=2, d_head=64, rope_dim=12)
_MAKE: dict[str, Callable[..., GemmProblem]] = {
    "gemm": partial(make_gemm, (2, 67, 264, 136)),
    "gemm-pitched-fp16": partial(make_gemm, (3, 5, 40, 24), dtype=FP16, pads=(8, 0, 16)),
    "qkv-gate-projection": partial(make_projection, _SMALL, (2, 9), fuse_norm_rope=False),
    "qkv-gate-projection-norm-rope": partial(make_projection, _NEXT, (2, 67)),
    "qkv-gate-projection-odd-pairs-fp16": partial(make_projection, _SMALL, (2, 9), dtype=FP16),
}


def _build(name: str, device: torch.device) -> dict[str, Any]:
    """Fields of a BuiltOp."""
    torch.manual_seed(3)
    problem = _MAKE[name](device=device)
    result = "y" if problem.geometry is None else "proj"

    def check(before: dict[str, Any], after: dict[str, Any]) -> None:
        problem.with_(**before).check(after[result])

    return {
        "plan": problem.plan(),
        "operands": problem.operands,
        "mutated": frozenset({result}),
        "check": check,
        "result": result,
        "returned": frozenset({result}),
    }


CASES: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    name: partial(_build, name) for name in _MAKE
}


def functional(name: str) -> Callable[[dict[str, Any]], torch.Tensor]:
    """The functional form on a case's operands."""
    if name.startswith("gemm"):
        return lambda operands: ops.gemm(operands["x"], operands["w"])
    knobs = _MAKE[name].keywords  # type: ignore[attr-defined]
    geometry = _MAKE[name].args[0]  # type: ignore[attr-defined]

    def call(operands: dict[str, Any]) -> torch.Tensor:
        operands = {key: value for key, value in operands.items() if key != "proj"}
        fused = knobs.get("fuse_norm_rope", True)
        return ops.qkv_gate_projection(**operands, geometry=geometry, fuse_norm_rope=fused)

    return call
