# SPDX-License-Identifier: Apache-2.0
"""Cases over a problem: sizes and data on one side, arms and checks on the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from benchmarks.harness.case import ArmCase, Lab, Outcome
from benchmarks.harness.measure import measure_graph
from benchmarks.harness.sets import MIN_LARGE_SETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    Tensors = dict[str, torch.Tensor]


class Problem(Protocol):
    """Sizes and data of one case."""

    @property
    def name(self) -> str:
        """Middle words of its rows."""

    @property
    def shape(self) -> str:
        """Last word of its rows."""

    @property
    def traffic_bytes(self) -> int:
        """Fewest bytes that a launch moves."""

    @property
    def flops(self) -> int | None:
        """Fewest operations of a launch, or None where only bytes bound it."""

    def make_set(self, device: str) -> Tensors:
        """Random operands, and written ones poisoned, by name."""


class ProblemCase(ArmCase):
    """Buffer sets of one problem; what its checks remember ends with the measurement."""

    min_sets = MIN_LARGE_SETS

    def __init__(self, problem: Problem, device: str) -> None:
        self._problem = problem
        self.device = device
        self.name = problem.name
        self.shape = problem.shape
        self.footprint_bytes = self.traffic_bytes = problem.traffic_bytes
        self.flops = problem.flops
        self._truth = None

    @override
    def make_sets(self, count: int) -> Sequence[Tensors]:
        return [self._problem.make_set(self.device) for _ in range(count)]

    @override
    def measure(self, lab: Lab) -> Outcome:
        try:
            return self._measure(lab)
        finally:
            self._truth = None

    def _measure(self, lab: Lab) -> Outcome:
        return measure_graph(self, lab)
