# SPDX-License-Identifier: Apache-2.0
"""Stage: one step of an op or block. It picks an engine, books workspace, compiles and launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from cudnn_blocks.errors import NotServedError
from cudnn_blocks.stages.capabilities import Capabilities, Facts
from cudnn_blocks.support import EngineReport, StageReport
from cudnn_blocks.target import Target
from cudnn_blocks.workspace import WorkspaceLayout

REFERENCE = "reference"


class Stage(ABC):
    """A step whose engines are the rows of ``rows``, the preferred one first.

    Args:
        facts: what is asked for; every constrained fact of every row has to be there.
        target: what to compile for.
        engine: name of a pinned engine. One that cannot serve declines; it never becomes another.
    """

    name: ClassVar[str]
    rows: ClassVar[tuple[Capabilities, ...]]

    def __init__(self, facts: Facts, target: Target, engine: str | None = None) -> None:
        self.facts = facts
        self.target = target
        self._pinned = engine
        self._row: Capabilities | None = None

    @property
    def engine(self) -> str:
        """Name of the engine chosen by ``check()``."""
        assert self._row is not None, f"{self.name}: engine asked for before check()"
        return self._row.engine

    @property
    def status(self) -> str:
        """How the chosen engine was validated on this target."""
        assert self._row is not None, f"{self.name}: status asked for before check()"
        return str(self._row.status(self.facts, self.target))

    def check(self) -> None:
        """Chooses the first engine that serves the facts; NotServedError when none does."""
        rows = [row for row in self.rows if self._pinned in (None, row.engine)]
        declines = {row.engine: row.decline(self.facts, self.target) for row in rows}
        self._row = next((row for row in rows if declines[row.engine] is None), None)
        if self._row is None:
            near = [row for row in rows if self.target.name in row.targets] or rows
            raise NotServedError(
                self.name,
                "; ".join(f"{row.engine}: {declines[row.engine]}" for row in near)
                or f"engine={self._pinned}",
                " | ".join(str(row) for row in near or self.rows),
            )

    def report(self) -> StageReport:
        """Every engine and what it says; never raises on a decline."""
        engines = []
        for row in self.rows:
            reason = row.decline(self.facts, self.target)
            engines.append(
                EngineReport(
                    engine=row.engine,
                    served=reason is None,
                    reason=reason,
                    status=row.status(self.facts, self.target),
                )
            )
        chosen = self._row
        return StageReport(
            stage=self.name,
            engine=chosen.engine if chosen else None,
            status=self.status if chosen else None,
            smem_bytes=self.smem_bytes() if chosen else None,
            engines=engines,
        )

    def book(self, layout: WorkspaceLayout) -> None:  # noqa: B027 - most stages need none
        """Books the stage's regions; legal after ``check()``."""

    def smem_bytes(self) -> int:
        """Shared memory of one CTA of the largest kernel."""
        return 0

    @abstractmethod
    def compile(self) -> None:
        """Compiles every kernel of the chosen engine; idempotent."""

    @abstractmethod
    def run_reference(self, operands: Sequence[torch.Tensor | None]) -> None:
        """Runs the reference engine on checked operands."""

    @abstractmethod
    def launch(self, operands: Sequence[torch.Tensor | None], stream: int) -> None:
        """Launches on ``stream`` with the operands' device current, and restores the caller's.

        No allocation, no sync, no conversion. TVM-FFI launchers switch devices themselves.
        """

    @abstractmethod
    def describe(self) -> str:
        """Tiles and modes of the chosen engine, in one line."""
