# SPDX-License-Identifier: Apache-2.0
"""The benchmarks through transformers' and FLA's modules: grids, bytes, and arms on the CPU."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks import fla_short_convolution, qwen3_next_attention
from benchmarks.fla_short_convolution.bench import DeviceCase
from benchmarks.fla_short_convolution.problem import DecodeProblem
from benchmarks.harness.case import Lab
from benchmarks.qwen3_next_attention.bench import LayerCase
from benchmarks.qwen3_next_attention.problem import LayerProblem
from cudnn_blocks import GatedAttentionGeometry
from tests.helpers import fla_stand_in

LAB = Lab(rounds=1, l2_bytes=60 << 20, ceiling_gb_s=None, timer=None, check_only=True)
SMALL = GatedAttentionGeometry(128, h_q=4, h_kv=2, d_head=64, rope_dim=16)
DECODE = DecodeProblem(rows=3, layers=4, channels=24)


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def measured(case):
    """The rows by arm; none of them failed."""
    outcome = case.measure(LAB)
    assert [row.note for row in outcome.rows if row.status == "failed"] == []
    return {row.arm: row for row in outcome.rows}


def test_the_layer_is_right_under_every_backend_at_hand():
    rows = measured(LayerCase(LayerProblem(12, SMALL), "cpu"))
    assert rows["ours"].engine == "reference"
    assert rows["transformers-sdpa"].status == "ok"
    assert rows["transformers-flash_attention_3"].status == "missing"


def test_the_layers_operations_and_bytes_are_the_blocks():
    problem = LayerProblem(8192)
    products = 2 * 8192 * 2048 * (9216 + 4096)
    attention = 4 * 16 * 256 * (8192 * 8193 // 2)
    assert problem.flops == products + attention
    assert problem.traffic_bytes > 2 * (2 * 8192 * 2048 + 2048 * (9216 + 4096))


def test_a_decode_step_is_right_with_and_without_the_adapter(monkeypatch):
    fla_stand_in.install(monkeypatch)
    rows = measured(DeviceCase(DECODE, "cpu"))
    assert rows["ours"].engine == "reference"
    assert rows["fla"].status == "ok"


def test_a_wrong_step_is_found(monkeypatch):
    fla_stand_in.install(monkeypatch)
    real = fla_stand_in.ShortConvolution.step

    def wrong(self, **arguments):
        y, cache = real(self, **arguments)
        return y + 1, cache

    monkeypatch.setattr(fla_stand_in.ShortConvolution, "step", wrong)
    rows = {row.arm: row for row in DeviceCase(DECODE, "cpu").measure(LAB).rows}
    assert rows["fla"].status == "failed"
    assert "layer 0" in rows["fla"].note
    assert rows["ours"].status == "ok"


def test_without_the_package_a_row_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, fla_stand_in.MODULE, None)
    (row,) = DeviceCase(DECODE, "cpu").measure(LAB).rows
    assert (row.arm, row.status) == ("fla", "missing")
    assert row.case.startswith("step/decode/4x-N3")


def test_step_traffic_is_what_the_operands_hold(monkeypatch):
    fla_stand_in.install(monkeypatch)
    buffers = DECODE.make_set("cpu")
    caches, inputs = (sum(x.numel() for x in buffers[name]) for name in ("caches", "inputs"))
    weights = sum(parameter.numel() for parameter in buffers["convs"].parameters())
    assert DECODE.traffic_bytes == 2 * (2 * caches + 2 * inputs + weights)


def test_the_grids_and_their_goals():
    assert [case.label for case in qwen3_next_attention.BENCH.cases] == [
        "qwen3-next/S2048",
        "qwen3-next/S8192",
    ]
    labels = [case.label for case in fla_short_convolution.BENCH.cases]
    assert labels == 2 * [f"decode/36x-N{rows}-D8192" for rows in (1, 32, 256)]
    assert [goal.bound for goal in qwen3_next_attention.BENCH.goals] == [1.5]
    assert [goal.bound for goal in fla_short_convolution.BENCH.goals] == [3.0, 1.0]
