# SPDX-License-Identifier: Apache-2.0
"""Cases whose outputs are checked on sampled rows: the scores of 32768 tokens fit no memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from typing_extensions import override

from benchmarks.harness import problem_case
from benchmarks.harness.problem_case import ProblemCase

if TYPE_CHECKING:
    from benchmarks.harness.arm import Arm

Tensors = dict[str, torch.Tensor]

MAX_ROWS = 64
ONE_SET_TOKENS = 32768
"""From here on one buffer set where operations bound the case: it is several times the L2."""
ELEMENT_FACTOR = 6.0
"""How far one element may be off, over how far a row may be in its norm."""


class Problem(problem_case.Problem, Protocol):
    """A problem of batch 1, BF16; axis 1 of every result counts tokens."""

    @property
    def tokens(self) -> int:
        """Rows of every result."""

    @property
    def footprint_bytes(self) -> int:
        """Distinct bytes that a launch touches."""

    def fresh(self, buffers: Tensors) -> Tensors:
        """The same data, with what an arm writes in new memory and poisoned where it can be."""

    def expected(self, buffers: Tensors, rows: torch.Tensor, variant: str) -> Tensors:
        """Some rows of the results of a variant by the FP32 reference."""

    def difference(self, actual: torch.Tensor, wanted: torch.Tensor, arm: Arm) -> str | None:
        """None, or what is wrong with those rows of an arm."""


def sample_rows(tokens: int, device: torch.device | str) -> torch.Tensor:
    """The first and the last row, and random ones between, in order."""
    inner = 1 + torch.randperm(max(tokens - 2, 0))[: MAX_ROWS - 2]
    return torch.cat([inner, torch.tensor([0, tokens - 1])]).unique().to(device)


def near(actual: torch.Tensor, wanted: torch.Tensor, limit: float) -> str | None:
    """Compares rows along the last axis relative to their size, which shrinks with the keys.

    Args:
        actual: of an arm.
        wanted: shape of actual.
        limit: of the norm of a row's error over the row's norm; an element's error may be
            ``ELEMENT_FACTOR`` times that, over the root mean square of the row.
    """
    if actual.shape != wanted.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(wanted.shape)}"
    wide = wanted.float()
    error = (actual.float() - wide).abs()
    rms = wide.square().mean(-1, keepdim=True).sqrt()
    rows = error.square().mean(-1, keepdim=True).sqrt() / rms
    is_bad = ~(rows <= limit) | ~(error / rms <= ELEMENT_FACTOR * limit).all(-1, keepdim=True)
    if not is_bad.any():
        return None
    return (
        f"{int(is_bad.sum())} of {is_bad.numel()} sampled rows off, worst relative error "
        f"{torch.where(rows.isnan(), torch.inf, rows).max().item():.3g}, at most {limit}"
    )


@dataclass
class _Truth:
    buffers: Tensors
    rows: torch.Tensor
    expected: dict[str, Tensors] = field(default_factory=dict)
    """By variant."""


class SampledCase(ProblemCase):
    """Checks every arm against the FP32 reference on sampled rows, and all rows for holes."""

    _problem: Problem
    _truth: _Truth | None

    def __init__(self, problem: Problem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.footprint_bytes = problem.footprint_bytes
        if problem.tokens >= ONE_SET_TOKENS and problem.flops is not None:
            self.min_sets = 1

    @override
    def check(self, arm: Arm) -> str | None:
        problem = self._problem
        if self._truth is None:
            rows = sample_rows(problem.tokens, self.device)
            self._truth = _Truth(problem.make_set(self.device), rows)
        truth = self._truth
        if arm.variant not in truth.expected:
            expected = problem.expected(truth.buffers, truth.rows, arm.variant)
            truth.expected[arm.variant] = expected
        buffers = problem.fresh(truth.buffers)
        returned = arm.bind(buffers)()
        actual = buffers if returned is None else returned
        for name, wanted in truth.expected[arm.variant].items():
            wrong = self._wrong(arm, actual.get(name), wanted, truth.rows)
            if wrong:
                return f"{name}: {wrong}"
        return None

    def _wrong(
        self, arm: Arm, actual: torch.Tensor | None, wanted: torch.Tensor, rows: torch.Tensor
    ) -> str | None:
        if actual is None:
            return "missing"
        if actual.dim() != wanted.dim() or actual.shape[1] != self._problem.tokens:
            return f"shape {tuple(actual.shape)} for {self._problem.tokens} tokens"
        holes = int((~torch.isfinite(actual)).sum())
        if holes:
            return f"{holes} elements are not finite"
        return self._problem.difference(actual[:, rows], wanted, arm)
