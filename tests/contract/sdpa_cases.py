# SPDX-License-Identifier: Apache-2.0
"""Attention in the contract suite; its capabilities are in test_sdpa_served.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from cudnn_blocks import ops
from tests.helpers.sdpa_problem import (
    CODES,
    NAMES,
    WRITTEN,
    SdpaProblem,
    assert_matches,
    make_problem,
)


@dataclass(frozen=True)
class _Case:
    options: dict[str, Any]
    engines: dict[str, str] = field(default_factory=dict)
    """Pins, on a GPU; the reference has no other engine beside it."""

    def build(self, device: torch.device) -> dict[str, Any]:
        """Fields of a BuiltOp."""
        torch.manual_seed(3)
        problem = make_problem(device=device, **self.options)
        engines = self.engines if device.type == "cuda" else {}

        def check(before: dict[str, Any], after: dict[str, Any]) -> None:
            geometry, scales = problem.geometry, problem.scales
            expected = SdpaProblem(geometry, dict(before), scales).expected()
            assert_matches(SdpaProblem(geometry, dict(after), scales), expected)

        return {
            "plan": problem.plan(engines=engines),
            "operands": problem.operands,
            "mutated": WRITTEN,
            "check": check,
            "result": "o",
            "returned": WRITTEN,
        }

    def call(self, operands: dict[str, Any]) -> torch.Tensor:
        """The functional form: the same output, new."""
        problem = make_problem(1, 1, device="meta", **self._mask())
        geometry = problem.geometry
        given = {name: operands[name] for name in NAMES if name not in WRITTEN}
        result = ops.sdpa_fwd(
            **given,
            is_causal=geometry.is_causal,
            causal_bottom_right=geometry.causal_bottom_right,
            window_left=geometry.window_left,
            window_right=geometry.window_right,
            return_lse=operands["lse"] is not None,
        )
        return result if isinstance(result, torch.Tensor) else result[0]

    def _mask(self) -> dict[str, Any]:
        names = ("is_causal", "causal_bottom_right", "window_left", "window_right")
        return {name: self.options[name] for name in names if name in self.options}


_PORTABLE = {"sdpa": "portable"}
_FP8: dict[str, Any] = {"b": 2, "s": 65, "sk": 80, "dtype": CODES, "has_gate": True}
_CASES = {
    "sdpa-causal": _Case({"b": 2, "s": 131, "has_lse": False}),
    "sdpa-gate-lse-lengths": _Case(
        {"b": 3, "s": 70, "sk": 90, "has_gate": True, "seq_lens": [0, 90, 33]}
    ),
    "sdpa-band-fp16": _Case(
        {
            "b": 2,
            "s": 65,
            "sk": 80,
            "heads": (3, 1),
            "dtype": torch.float16,
            "causal_bottom_right": True,
            "window_left": 9,
            "window_right": 2,
        }
    ),
    "sdpa-portable-gate": _Case({"b": 2, "s": 131, "has_gate": True}, _PORTABLE),
    "sdpa-portable-full-d128": _Case(
        {"b": 2, "s": 65, "d_head": 128, "is_causal": False, "has_lse": False}, _PORTABLE
    ),
    "sdpa-fp8-lengths": _Case({**_FP8, "seq_lens": [33, 80]}),
    "sdpa-fp8-codes-d256": _Case({**_FP8, "o_dtype": CODES, "d_head": 256}),
    "sdpa-portable-fp8": _Case({**_FP8, "o_dtype": CODES, "window_left": 9}, _PORTABLE),
}
CASES: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    name: case.build for name, case in _CASES.items()
}


def functional(name: str) -> Callable[[dict[str, Any]], torch.Tensor] | None:
    """The functional form on a case's operands; it pins no engine."""
    case = _CASES[name]
    has_form = not case.engines and case.options.get("dtype") != CODES  # which has no scales
    return case.call if has_form else None
