# SPDX-License-Identifier: Apache-2.0
"""The norm's benchmark: its grid, its bytes, and its arms on the CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.case import Lab
from benchmarks.rmsnorm_silu_pad import BENCH, cases
from benchmarks.rmsnorm_silu_pad.bench import NormCase
from benchmarks.rmsnorm_silu_pad.problem import NormProblem

LAB = Lab(rounds=1, l2_bytes=60 << 20, ceiling_gb_s=None, timer=None, check_only=True)
PROBLEMS = [
    NormProblem("plain", 16, 3, 5, 1),
    NormProblem("history", 16, 3, 5, 3, history_frames=2),
    NormProblem("residual", 24, 3, 5, 1, history_frames=2, has_residual=True),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda one: one.name)
def test_check_only_is_right_on_the_reference_engine(problem):
    outcome = NormCase(problem, "cpu").measure(LAB)
    rows = {row.arm: row for row in outcome.rows}
    assert [row.note for row in outcome.rows if row.status == "failed"] == []
    assert rows["ours"].engine == "reference"
    assert rows["torch-compile"].status == "missing"
    assert rows["torch-eager"].status == "ok"


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda one: one.name)
def test_reference_and_torch_agree_on_every_result(problem):
    buffers = problem.make_set("cpu")
    expected, unfused = problem.expected(buffers), problem.unfused(buffers)
    assert expected.keys() == unfused.keys() == set(problem.results)
    for name, wanted in expected.items():
        torch.testing.assert_close(unfused[name], wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda one: one.name)
def test_traffic_is_what_the_operands_hold(problem):
    buffers = problem.make_set("cpu")
    assert problem.traffic_bytes == sum(2 * tensor.numel() for tensor in buffers.values())


def test_the_row_that_has_a_goal():
    plain = cases.PROBLEMS[0]
    assert (plain.name, plain.shape) == ("plain", "C160-T4-352x640")
    read, padded, cache = 4 * 352 * 640, 6 * 354 * 642, 2 * 352 * 640
    assert plain.traffic_bytes == 2 * (160 * (read + padded + cache) + 160)
    labels = [case.label for case in BENCH.cases]
    assert len(labels) == len(set(labels))
    assert sum(label.endswith("/C160-T4-352x640") for label in labels) == 3
    assert [goal.measure for goal in BENCH.goals] == ["share"]
