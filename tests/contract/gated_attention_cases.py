# SPDX-License-Identifier: Apache-2.0
"""The gated attention block in the contract suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from cudnn_blocks import GatedAttentionGeometry, ops
from cudnn_blocks.reference.gated_attention import gated_attention
from tests.helpers.gated_attention_precision import (
    BLOBS,
    D128,
    GPU_SLACK,
    MODES,
    PrecisionMode,
    assert_close_to_stated,
    make_precision_problem,
)
from tests.helpers.gated_attention_problem import READ, GatedProblem, assert_close, make_problem
from tests.helpers.tensors import assert_same_bits

WRITTEN = frozenset({"out", "lse"})
D64 = GatedAttentionGeometry(d_model=128, h_q=4, h_kv=2, d_head=64, rope_dim=16)
D256 = GatedAttentionGeometry(d_model=128, h_q=2, h_kv=1, d_head=256, rope_dim=64)


@dataclass(frozen=True)
class _Case:
    geometry: GatedAttentionGeometry = D64
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, device: torch.device) -> dict[str, Any]:
        """Fields of a BuiltOp."""
        torch.manual_seed(3)
        problem = make_problem(self.geometry, 2, 70, device=device, **self.options)

        def check(before: dict[str, Any], after: dict[str, Any]) -> None:
            given = problem.with_(**before)
            out, lse = expected(given)
            if device.type == "cpu":
                assert_same_bits(after["out"], out, "out")
            else:
                assert_close(after["out"], out, "out")
            if after["lse"] is not None:
                torch.testing.assert_close(after["lse"].cpu(), lse.cpu(), atol=0.02, rtol=0)

        return {
            "plan": problem.plan(),
            "operands": problem.operands,
            "mutated": WRITTEN,
            "check": check,
            "returned": WRITTEN,
        }

    def call(self, operands: dict[str, Any]) -> torch.Tensor:
        """The functional form."""
        problem = GatedProblem(self.geometry, operands, {})
        options = {name: value for name, value in self.options.items() if name.startswith("fuse")}
        result = ops.gated_attention(
            *(operands[name] for name in READ),
            self.geometry,
            seq_lens=operands["seq_lens"],
            return_lse=problem.operands["lse"] is not None,
            **options,
        )
        return result[0] if isinstance(result, tuple) else result


def expected(problem: GatedProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's out and LSE, where the operands are."""
    return gated_attention(
        *(problem.operands[name] for name in READ),
        problem.geometry,
        seq_lens=problem.operands["seq_lens"],
        fuse_norm_rope=problem.knobs.get("fuse_norm_rope", False),
    )


@dataclass(frozen=True)
class _PrecisionCase:
    mode: PrecisionMode
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, device: torch.device) -> dict[str, Any]:
        """Fields of a BuiltOp."""
        torch.manual_seed(4)
        problem = make_precision_problem(self.mode, D128, 2, 40, device=device, **self.options)

        def check(before: dict[str, Any], after: dict[str, Any]) -> None:
            given = problem.with_(**{**before, **{name: after[name] for name in WRITTEN}})
            assert_close_to_stated(given, slack=1.0 if device.type == "cpu" else GPU_SLACK)

        return {
            "plan": problem.plan(),
            "operands": problem.operands,
            "mutated": WRITTEN,
            "check": check,
            "returned": WRITTEN,
        }

    def call(self, operands: dict[str, Any]) -> torch.Tensor:
        """The functional form."""
        problem = make_precision_problem(self.mode, D128, 1, 1)
        result = ops.gated_attention(
            *(operands[name] for name in READ),
            D128,
            seq_lens=operands["seq_lens"],
            return_lse=operands["lse"] is not None,
            quant=problem.quant,
            **self.mode.knobs,
            **{name: operands[name] for name in BLOBS if name in operands},
        )
        return result[0] if isinstance(result, tuple) else result


_BOTH = {"fuse_norm_rope": True, "fuse_gate": True}
_CASES: dict[str, _Case | _PrecisionCase] = {
    "gated-attention-unfused": _Case(options={"seq_lens": [23, 70], "has_lse": True}),
    "gated-attention-fused": _Case(options=_BOTH),
    "gated-attention-fused-d256-fp16": _Case(
        D256, {**_BOTH, "dtype": torch.float16, "seq_lens": [0, 70], "has_lse": True}
    ),
    "gated-attention-fused-norm-rope": _Case(D256, {"fuse_norm_rope": True, "table_rows": 90}),
    "gated-attention-fp8-fused": _PrecisionCase(
        MODES["fp8-fused"], {"seq_lens": [23, 40], "has_lse": True}
    ),
    "gated-attention-mxfp8-fused": _PrecisionCase(MODES["mxfp8-fused"], {"seq_lens": [40, 9]}),
    "gated-attention-mxfp4-weights": _PrecisionCase(MODES["mxfp4-weights"]),
    "gated-attention-nvfp4-output": _PrecisionCase(MODES["nvfp4-output"], {"seq_lens": [40, 9]}),
}
CASES: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    name: case.build for name, case in _CASES.items()
}


def functional(name: str) -> Callable[[dict[str, Any]], torch.Tensor]:
    """The functional form on a case's operands."""
    return _CASES[name].call
