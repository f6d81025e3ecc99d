# SPDX-License-Identifier: Apache-2.0
"""Cases whose arms produce tensors of known names, into the buffer set or as a mapping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from typing_extensions import override

from benchmarks.harness import problem_case
from benchmarks.harness.arm import Arm, Role
from benchmarks.harness.checks import CONV3D, close
from benchmarks.harness.problem_case import ProblemCase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.harness.case import Lab, Outcome

    Tensors = dict[str, torch.Tensor]


class Problem(problem_case.Problem, Protocol):
    """A problem whose operands are read or written, none both."""

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the tensors that a launch of ours produces."""

    def expected(self, buffers: Tensors) -> Tensors:
        """The results by the reference, in new tensors."""

    def unfused(self, buffers: Tensors) -> Tensors:
        """The results by torch, op by op."""


@dataclass(frozen=True)
class _Truth:
    buffers: Tensors
    expected: Tensors
    unfused: Tensors


class OutputsCase(ProblemCase):
    """Checks every arm against the reference, and ours against torch as well."""

    _problem: Problem
    _truth: _Truth | None

    def __init__(self, problem: Problem, device: str = "cuda") -> None:
        super().__init__(problem, device)

    @override
    def check(self, arm: Arm) -> str | None:
        if self._truth is None:
            buffers = self._problem.make_set(self.device)
            self._truth = _Truth(
                buffers, self._problem.expected(buffers), self._problem.unfused(buffers)
            )
        truth = self._truth
        is_peer = arm.role is Role.PEER
        fresh = {name: torch.full_like(truth.buffers[name], torch.nan) for name in truth.expected}
        buffers = truth.buffers | fresh
        returned = arm.bind(buffers)()
        actual = buffers if returned is None else returned
        wrong = differences(actual, truth.expected, "the reference", may_lack=is_peer)
        if wrong is None and not is_peer:
            wrong = differences(actual, truth.unfused, "torch", may_lack=False)
        return wrong

    @override
    def _measure(self, lab: Lab) -> Outcome:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            return super()._measure(lab)


def differences(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    whose: str,
    *,
    may_lack: bool,
) -> str | None:
    """What is wrong with the first result that is; a peer may produce some of them only."""
    if not expected.keys() & actual.keys():
        return f"it has none of {', '.join(expected)}"
    for name, wanted in expected.items():
        if name not in actual:
            if may_lack:
                continue
            return f"{name} is missing"
        wrong = close(actual[name], wanted, CONV3D, name)
        if wrong:
            return f"{wrong}, by {whose}"
    return None
