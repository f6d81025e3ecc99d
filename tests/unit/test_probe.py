# SPDX-License-Identifier: Apache-2.0
"""probe(): never raises on a decline, says why, prints and dumps."""

from __future__ import annotations

import json

import pytest
import torch

from cudnn_blocks import CausalConv1dGeometry, CausalConv1dUpdate, SupportReport, TensorSpec
from cudnn_blocks.stages import toolchain
from cudnn_blocks.support import render_reports
from cudnn_blocks.target import GPU_TARGET_NAMES
from tests.helpers.toy_op import ToyGeometry, ToyOp, make_toy


def conv1d_arguments(channels=8, width=4, state_len=4, dtype=torch.bfloat16):
    spec = TensorSpec.contiguous
    return (
        spec((1, channels), dtype),
        spec((1, channels, state_len), dtype),
        spec((channels, width), dtype),
        spec((1, channels), dtype),
        CausalConv1dGeometry(channels, width, state_len),
    )


def test_on_a_plan_and_on_the_class_alike():
    x = torch.ones(3, 8)
    of_class = ToyOp.probe(x, x.clone(), ToyGeometry(8))
    assert of_class == make_toy().probe()
    assert of_class.served
    assert bool(of_class)
    assert (of_class.op, of_class.target, of_class.workspace_bytes) == ("toy", "cpu", 512)
    assert (of_class.decline, of_class.decline_type) == (None, None)
    (stage,) = of_class.stages
    assert (stage.stage, stage.engine, stage.status) == ("double", "reference", "compile-only")
    assert [engine.reason for engine in stage.engines] == [
        "target=cpu (served: sm_90a)",
        None,
    ]


def test_a_decline_says_what_check_support_raises():
    plan = make_toy(columns=1)
    report = plan.probe()
    assert not report
    assert report.decline_type == "NotServedError"
    assert report.workspace_bytes is None
    with pytest.raises(NotImplementedError) as raised:
        plan.check_support()
    assert report.decline == str(raised.value)
    assert report.stages[0].engine is None


@pytest.mark.parametrize(
    ("knobs", "decline_type"),
    [
        ({"columns": 1}, "NotServedError"),
        ({"target": "sm_20"}, "ContractError"),
        ({"device": "meta"}, "ContractError"),
        ({"engines": {"nothing": "fast"}}, "ContractError"),
        ({"engines": {"double": "fast"}}, "NotServedError"),
        ({"device": "meta", "target": "sm_80"}, "NotServedError"),
    ],
)
def test_declines_never_raise(knobs, decline_type):
    assert make_toy(**knobs).probe().decline_type == decline_type


def test_a_missing_gpu_is_a_decline(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = TensorSpec.contiguous((3, 8), torch.float32, "cuda:0")
    report = ToyOp.probe(spec, spec, ToyGeometry(8))
    assert report.decline_type == "CudaUnavailableError"


@pytest.mark.parametrize("report", [make_toy().probe(), make_toy(columns=1).probe()])
def test_json_round_trip(report):
    assert SupportReport.model_validate_json(report.model_dump_json()) == report
    assert json.loads(report.model_dump_json()) == report.model_dump()


def test_reports_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        make_toy().probe().served = False


def test_the_table_has_a_row_per_report_and_the_declines():
    reports = [make_toy().probe(), make_toy(columns=1).probe()]
    text = render_reports(reports)
    assert text.count("double") >= 2
    assert "toy on cpu declines: double: reference: columns=1 (served: 2 and up)" in text
    assert "declines" not in str(reports[0])


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
def test_conv1d_is_served_on_every_gpu_without_one_at_hand(target):
    report = CausalConv1dUpdate.probe(*conv1d_arguments(), target=target)
    assert report.served, report
    assert report.workspace_bytes == 0
    assert report.stages[0].engine == "portable"
    assert report.stages[0].smem_bytes is not None


def test_the_reference_is_listed_but_not_chosen_for_a_gpu():
    report = CausalConv1dUpdate.probe(*conv1d_arguments(), target="sm_90a")
    reasons = {engine.engine: engine.reason for engine in report.stages[0].engines}
    assert reasons == {"portable": None, "reference": "target=sm_90a (served: cpu)"}


@pytest.mark.parametrize(
    ("version", "shown"), [(None, "not installed"), ("4.7.0", "4.7.0"), ("4.8.0", "4.8.0")]
)
def test_a_missing_or_old_dsl_is_a_decline_that_names_the_version(monkeypatch, version, shown):
    monkeypatch.setattr(toolchain, "dsl_version", lambda: version)
    report = CausalConv1dUpdate.probe(*conv1d_arguments(), target="sm_90a")
    assert report.decline_type == "NotServedError"
    assert f"portable: nvidia-cutlass-dsl {shown} (served: 4.8.1 and up)" in report.decline
    assert CausalConv1dUpdate.probe(*conv1d_arguments(), target="cpu").served


def test_one_plan_may_be_probed_before_and_after_compile():
    plan = make_toy()
    before = plan.probe()
    plan.compile()
    assert plan.probe() == before
