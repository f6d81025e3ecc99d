# SPDX-License-Identifier: Apache-2.0
"""The Conv3D ops in the contract suite; their capabilities are in test_conv3d_ops_served.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.helpers.conv3d_forms import BIAS_PAD, CAUSAL, FORMS, NORM, NORM_ONLY, NORM_PAD, RAW
from tests.helpers.conv3d_problem import Conv3dProblem, assert_close, assert_exact, make_problem

SITES = (1, 2, 9, 10)


@dataclass(frozen=True)
class _Case:
    kind: str
    result: str
    """A result that the op writes whole."""
    options: dict[str, Any] = field(default_factory=dict)
    channels: tuple[int, int] = (160, 160)

    def problem(self, device: torch.device) -> Conv3dProblem:
        torch.manual_seed(3)
        problem = make_problem(self.kind, SITES, self.channels, device=device, **self.options)
        if self.kind == CAUSAL:  # every other column of a clip with the channels last
            n, c, t, h, w = problem["input"].shape
            clip = torch.randn(n, t, h, 2 * w, c, device=device).to(torch.bfloat16)
            problem = problem.with_(input=clip.permute(0, 4, 1, 2, 3)[..., ::2])
        return problem

    def build(self, device: torch.device) -> dict[str, Any]:
        """Fields of a BuiltOp."""
        problem = self.problem(device)

        def check(before: dict[str, Any], after: dict[str, Any]) -> None:
            expected = problem.with_(**before).expected()
            same = assert_exact if after["input"].device.type == "cpu" else assert_close
            same({name: after[name] for name in expected}, expected, problem.kind)

        return {
            "plan": problem.plan(),
            "operands": problem.operands,
            "mutated": frozenset(problem.written),
            "check": check,
            "result": self.result,
            "returned": frozenset(problem.written),
        }

    def call(self, operands: dict[str, Any]) -> torch.Tensor:
        """The functional form: the same result, new. Also inside a capture, so nothing is made."""
        knobs = {name: self.options.get(name, 0) for name in FORMS[self.kind].knobs}
        result = Conv3dProblem(self.kind, operands, knobs).call()[self.result]
        assert result is not None
        return result


_CASES = {
    "conv3d-raw-hint": _Case(RAW, "output", {"zero_leading_frames": 1}),
    "conv3d-raw-odd-channels": _Case(RAW, "output", channels=(24, 40)),
    "conv3d-norm-320-residual": _Case(
        NORM, "output", {"residual": "add_biased"}, channels=(160, 320)
    ),
    "conv3d-norm-odd-channels": _Case(NORM, "output", channels=(24, 40)),
    "conv3d-norm-pad-first-chunk": _Case(NORM_PAD, "padded_output", {"residual": "add"}),
    "conv3d-norm-pad-history": _Case(NORM_PAD, "cache_output", {"history_frames": 2}),
    "conv3d-bias-residual-pad": _Case(BIAS_PAD, "padded_output", {"residual": "add_biased"}),
    "rmsnorm-silu-pad-history": _Case(
        NORM_ONLY,
        "padded_output",
        {"residual": "add_biased", "history_frames": 2, "has_input_bias": True},
    ),
    "rmsnorm-silu-pad-save-input": _Case(NORM_ONLY, "padded_output", {"residual": "save_input"}),
    "causal-conv3d-first-chunk": _Case(CAUSAL, "output"),
    "causal-conv3d-later-chunk": _Case(CAUSAL, "output", {"history_frames": 2}),
}
CASES: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    name: case.build for name, case in _CASES.items()
}


def functional(name: str) -> Callable[[dict[str, Any]], torch.Tensor]:
    """The functional form on a case's operands."""
    return _CASES[name].call
