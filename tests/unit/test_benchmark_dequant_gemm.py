# SPDX-License-Identifier: Apache-2.0
"""The benchmark of products with coded weights: its grid, its bytes, its arms on the CPU."""

from __future__ import annotations

import pytest

from benchmarks.dequant_gemm import BENCH
from benchmarks.dequant_gemm.bench import DequantGemmCase
from benchmarks.dequant_gemm.problem import DequantGemmProblem
from benchmarks.harness.case import Lab

LAB = Lab(rounds=1, l2_bytes=60 << 20, ceiling_gb_s=None, timer=None, check_only=True)
FORMATS = ("mxfp4", "nvfp4", "mxfp8")


@pytest.mark.parametrize("fmt", FORMATS)
def test_check_only_is_right_on_the_reference_engine(fmt):
    outcome = DequantGemmCase(DequantGemmProblem(fmt, 136, 96, 5), "cpu").measure(LAB)
    assert [(row.arm, row.status, row.note) for row in outcome.rows if row.status != "ok"] == []
    assert {row.arm for row in outcome.rows} >= {"ours", "cublas-bf16"}


@pytest.mark.parametrize(("fmt", "bits"), [("mxfp4", 4.25), ("nvfp4", 4.5), ("mxfp8", 8.25)])
def test_bytes_of_weights(fmt, bits):
    problem = DequantGemmProblem(fmt, 9216, 2048, 1)
    assert problem.weight_bytes * 8 == bits * 9216 * 2048
    assert problem.traffic_bytes == problem.weight_bytes + 2 * (9216 + 2048)


def test_every_goal_has_rows():
    labels = {f"gemm/{case.label}" for case in BENCH.cases}
    assert len(labels) == len(BENCH.cases)
    assert {goal.bound for goal in BENCH.goals} == {2.0, 0.85}
    assert {"gemm/mxfp4-9216x2048/M32", "gemm/nvfp4-9216x2048/M4096"} <= labels
