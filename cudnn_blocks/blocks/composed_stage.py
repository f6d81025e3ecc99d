# SPDX-License-Identifier: Apache-2.0
"""ComposedStage: a stage of several launches, each of which is a stage of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace

from cudnn_blocks.stages.capabilities import Capabilities
from cudnn_blocks.stages.gated_attention.evidence import CODES, TESTED
from cudnn_blocks.stages.gemm.stage import HOPPER, PORTABLE
from cudnn_blocks.stages.stage import REFERENCE, Stage
from cudnn_blocks.target import CPU


class ComposedStage(Stage):
    """Its engine is that of one launch among them, whose rows it has."""

    @property
    @abstractmethod
    def _parts(self) -> list[Stage]:
        """In no order."""

    def check(self) -> None:
        """Chooses the engine, and those of all launches."""
        super().check()
        for part in self._parts:
            part.check()

    def compile(self) -> None:
        """Compiles every kernel."""
        for part in self._parts:
            part.compile()


def rows_of_codes(rows: Iterable[Capabilities], cpu_test: str) -> tuple[Capabilities, ...]:
    """A launch's rows, with evidence of all launches together on operands in codes."""
    evidence = {HOPPER: CODES, PORTABLE: TESTED, REFERENCE: {CPU.name: cpu_test}}
    return tuple(
        replace(row, evidence=evidence.get(row.engine, {}), shown={}, beyond={}) for row in rows
    )
