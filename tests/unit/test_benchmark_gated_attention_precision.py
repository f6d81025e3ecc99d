# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the precision modes: its grid, its goals, its bytes, its arms on the CPU."""

from __future__ import annotations

import fnmatch

import pytest
import torch

from benchmarks.gated_attention_precision import BENCH, cases
from benchmarks.gated_attention_precision.bench import (
    BF16_FUSED,
    FA3_FP8,
    Fp8SdpaCase,
    PrecisionBlockCase,
)
from benchmarks.gated_attention_precision.block_problem import PrecisionBlockProblem
from benchmarks.gated_attention_precision.sdpa_problem import Fp8SdpaProblem
from benchmarks.harness.case import Lab
from cudnn_blocks import GatedAttentionGeometry

torch.set_num_threads(1)  # sizes are small: threads would only wait for one another

LAB = Lab(rounds=1, l2_bytes=60 << 20, ceiling_gb_s=None, timer=None, check_only=True)
GEOMETRY = GatedAttentionGeometry(256, h_q=4, h_kv=2, d_head=128, rope_dim=32)
PRECISIONS = (*cases.TOKENS, "mxfp4-output")


def problem(precision: str, geometry=GEOMETRY, tokens: int = 70) -> PrecisionBlockProblem:
    return PrecisionBlockProblem("small", geometry, tokens, precision)


def test_the_grid_and_its_goal():
    labels = [case.label for case in BENCH.cases]
    assert len(set(labels)) == len(labels) == 23
    rows = [f"block/{case.name}/{mode}/{case.shape}" for case in BENCH.cases for mode in case.modes]
    rows += [f"sdpa/{case.label}" for case in BENCH.cases if isinstance(case, Fp8SdpaCase)]
    found = [len(fnmatch.filter(rows, goal.case)) for goal in BENCH.goals]
    assert found == [2, 3]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_check_only_is_right_on_the_reference_engine(precision):
    torch.manual_seed(0)
    outcome = PrecisionBlockCase(problem(precision), "cpu").measure(LAB)
    assert {(row.arm, row.status) for row in outcome.rows} >= {("ours", "ok"), (BF16_FUSED, "ok")}
    assert not outcome.ours_failed
    for row in outcome.rows:
        assert "weights" in row.engine
        assert "workspace" in row.engine


@pytest.mark.parametrize("precision", PRECISIONS)
def test_values_in_bf16_are_those_of_the_codes(precision):
    """The BF16 block is handed the same layer: its values are what codes and scales stand for."""
    torch.manual_seed(0)
    one = problem(precision)
    buffers = one.make_set("cpu")
    for name, std in (("h", 1.0), ("w_qkvg", 256**-0.5), ("w_o", 512**-0.5)):
        assert buffers[name].dtype == torch.bfloat16
        assert 0.4 * std < buffers[name].float().std() < 2.5 * std, name
    if hasattr(one.quant, "descale_h"):
        assert torch.equal(buffers["h_codes"].float() * one.quant.descale_h, buffers["h"].float())


def test_the_attention_of_codes():
    """The peer is a row of its own that says what is missing."""
    torch.manual_seed(0)
    one = Fp8SdpaProblem(4, 2, 64, True, 70)
    outcome = Fp8SdpaCase(one, "cpu").measure(LAB)
    status = {row.arm: row.status for row in outcome.rows}
    assert status["ours"] == "ok"
    assert status[FA3_FP8] == "missing"
    assert one.traffic_bytes == 70 * 64 * (4 + 2 * 2 + 2 * 4)


def test_bytes():
    large = cases.GEOMETRIES[cases.QWEN3_NEXT]
    bf16 = problem("fp8", large).bf16_weight_bytes
    assert bf16 == 2 * 2048 * (9216 + 4096)
    assert problem("fp8-fused", large).weight_bytes == bf16 // 2
    assert problem("mxfp8", large).weight_bytes == bf16 // 2 + 9216 * 64
    assert problem("mxfp4-weights", large).weight_bytes == 2048 * (9216 // 2 + 4096) + 9216 * 64
    nvfp4 = 2048 * (9216 + 2048) + 9216 * 64 + 2048 * 256
    assert problem("nvfp4-output", large).weight_bytes == nvfp4
    assert problem("fp8", large).traffic_bytes > problem("fp8", large).weight_bytes
