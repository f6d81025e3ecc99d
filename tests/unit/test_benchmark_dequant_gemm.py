# SPDX-License-Identifier: Apache-2.0
"""The benchmark of products with coded weights: its grid, its bytes, its arms on the CPU."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from benchmarks.dequant_gemm import BENCH
from benchmarks.dequant_gemm.bench import DequantGemmCase
from benchmarks.dequant_gemm.peers import CUBLAS_BF16, QUACK, WEIGHT_ONLY
from benchmarks.dequant_gemm.problem import DequantGemmProblem
from benchmarks.harness.case import Lab
from cudnn_blocks.quant_spec import BLOCK_FORMATS
from cudnn_blocks.reference.gated_attention_precision import values_of
from cudnn_blocks.reference.scale_blobs import pack_scales

LAB = Lab(rounds=1, l2_bytes=60 << 20, ceiling_gb_s=None, timer=None, check_only=True)
FORMATS = ("mxfp4", "nvfp4", "mxfp8")


@pytest.mark.parametrize("fmt", FORMATS)
def test_check_only_is_right_on_the_reference_engine(fmt):
    outcome = DequantGemmCase(DequantGemmProblem(fmt, 136, 96, 5), "cpu").measure(LAB)
    status = {row.arm: row.status for row in outcome.rows}
    assert status == {"ours": "ok", CUBLAS_BF16: "ok", QUACK: "missing"}
    words = [row.case.split("/")[1:] for row in outcome.rows]
    name = f"{fmt}-136x96"
    assert words == [[name, "M5"], [name, "M5"], [name, WEIGHT_ONLY, "M5"]]
    for row in outcome.rows[:2]:
        assert "MB, workspace 0.0 MB" in row.engine


class QuackStandIn(ModuleType):
    """Keeps codes and scales as they are handed over, and multiplies by the reference."""

    @staticmethod
    def prepare_w4_weight(q, sf=None, wformat=""):
        del wformat
        return q.clone(), sf.clone()

    @staticmethod
    def gemm_w4a16(act, blob, sf=None, *, out, wformat):
        values = values_of(blob, pack_scales(sf), BLOCK_FORMATS[wformat])
        return torch.mm(act, values.t(), out=out)


@pytest.fixture
def quack(monkeypatch):
    for name in ("quack", "quack.gemm_w4"):
        monkeypatch.setitem(sys.modules, name, QuackStandIn(name))


@pytest.mark.parametrize("fmt", FORMATS)
def test_quack_stands_against_ours_apart_from_cublas(quack, fmt):
    outcome = DequantGemmCase(DequantGemmProblem(fmt, 136, 96, 5), "cpu").measure(LAB)
    found = [(row.case.split("/")[2], row.arm, row.status, row.note) for row in outcome.rows]
    checked = ("ok", "checked, not timed")
    assert found == [
        ("M5", "ours", *checked),
        ("M5", CUBLAS_BF16, *checked),
        (WEIGHT_ONLY, "ours", *checked),
        (WEIGHT_ONLY, QUACK, *checked),
    ]


@pytest.mark.parametrize(("fmt", "bits"), [("mxfp4", 4.25), ("nvfp4", 4.5), ("mxfp8", 8.25)])
def test_bytes_of_weights(fmt, bits):
    problem = DequantGemmProblem(fmt, 9216, 2048, 1)
    assert problem.weight_bytes * 8 == bits * 9216 * 2048
    assert problem.value_bytes * 8 == 16 * 9216 * 2048
    assert problem.traffic_bytes == problem.weight_bytes + 2 * (9216 + 2048)


def test_every_goal_has_rows():
    labels = {f"gemm/{case.label}" for case in BENCH.cases}
    assert len(labels) == len(BENCH.cases)
    assert {goal.bound for goal in BENCH.goals} == {2.0, 0.85}
    assert {"gemm/mxfp4-9216x2048/M32", "gemm/nvfp4-9216x2048/M4096"} <= labels
