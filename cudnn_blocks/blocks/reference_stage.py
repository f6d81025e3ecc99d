# SPDX-License-Identifier: Apache-2.0
"""ReferenceStage: a step that only the reference engine serves; every GPU target declines it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cudnn_blocks.stages.capabilities import Capabilities, OneOf
from cudnn_blocks.stages.stage import REFERENCE, Stage
from cudnn_blocks.target import Target


class ReferenceStage(Stage):
    """One step in torch.

    Args:
        name: of the slot that the stage fills.
        run: takes the stage's operands.
        target: what to compile for.
        engine: pin.
    """

    name = "reference"
    rows = (
        Capabilities(
            engine=REFERENCE,
            targets=OneOf(("cpu",)),
            serves={},
            evidence={"cpu": "tests/unit/test_gated_attention_precision.py"},
        ),
    )

    def __init__(
        self,
        name: str,
        run: Callable[..., None],
        target: Target,
        engine: str | None = None,
    ) -> None:
        super().__init__({}, target, engine)
        self.name = name  # type: ignore[misc]  # of its slot
        self._run = run

    def compile(self) -> None:
        """Nothing to compile."""

    def launch(self, operands: Sequence[torch.Tensor | None], stream: int) -> None:
        """Never reached: no GPU target passes ``check()``."""
        raise AssertionError(f"{self.name} has no GPU engine")

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        self._run(*operands)

    def describe(self) -> str:
        """What a plan prints of it."""
        return "allocates"
