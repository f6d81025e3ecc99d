# SPDX-License-Identifier: Apache-2.0
"""Deploy files: one request for every op, plans as the ops' own, and the published schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cudnn_blocks
from cudnn_blocks import ContractError
from cudnn_blocks.api_base import APIBase
from cudnn_blocks.deploy import REQUESTS, DeployFile, deploy_schema, read_deploy_file
from cudnn_blocks.support import reports_schema

SCHEMAS = Path(__file__).parents[2] / "docs" / "schema"
HEADS = {"h_q": 16, "h_kv": 2}
FRAMES = {"frames": 4, "height": 34, "width": 34}
CONV = {**FRAMES, "in_channels": 160, "out_channels": 160}
SMALLEST: dict[str, dict[str, Any]] = {
    "causal-conv1d-update": {"channels": 8192},
    "causal-conv3d-with-cache": FRAMES,
    "conv3d-bias-residual-pad": CONV,
    "conv3d-raw": CONV,
    "conv3d-rmsnorm-silu": CONV,
    "conv3d-rmsnorm-silu-pad": CONV,
    "dequant-gemm": {"n": 1024, "k": 512, "fmt": "mxfp4"},
    "dequantize-block": {"d_head": 128, "fmt": "mxfp8"},
    "gated-attention-block": {"d_model": 2048, **HEADS},
    "gemm": {"n": 1024, "k": 512},
    "qk-norm-rope": HEADS,
    "qkv-gate-projection": {"d_model": 2048, **HEADS},
    "quantize-block": {"d_head": 128, "fmt": "nvfp4"},
    "quantize-fp8": {"d_head": 128},
    "rmsnorm-silu-pad": {**FRAMES, "channels": 160},
    "sdpa-fwd": HEADS,
    "sigmoid-gate": {"h_q": 16},
}
"""Op to the fields that have no default."""


def deploy(*plans: dict[str, Any], **more: Any) -> DeployFile:
    return DeployFile.model_validate_json(json.dumps({"plans": plans, **more}))


def test_every_op_and_block_has_one_request():
    public = [getattr(cudnn_blocks, name) for name in cudnn_blocks.__all__]
    ops = {
        one
        for one in public
        if isinstance(one, type) and issubclass(one, APIBase) and one is not APIBase
    }
    assert {request.op_class for request in REQUESTS} == ops
    assert len(REQUESTS) == len(ops)
    for request in REQUESTS:
        assert request.op_name() == request.op_class.op_name
    assert sorted(SMALLEST) == sorted(request.op_name() for request in REQUESTS)


@pytest.mark.parametrize("op", SMALLEST)
def test_what_has_no_default_makes_a_served_plan(op):
    (request,) = deploy({"op": op, **SMALLEST[op]}).plans
    for target in ("sm_90a", "sm_80", "cpu"):
        report = request.plan(target).probe()
        assert (report.op, report.served) == (op, True), report


@pytest.mark.parametrize(
    ("op", "knobs"),
    [
        ("causal-conv1d-update", {"bias": True, "indices": True, "on_bad_index": "report"}),
        ("causal-conv1d-update", {"state_len": 3, "state_layout": "channel-last"}),
        ("causal-conv3d-with-cache", {"history_frames": 2, "padded_input": True}),
        ("conv3d-bias-residual-pad", {"residual_bias": True, "zero_leading_frames": 1}),
        ("conv3d-rmsnorm-silu", {"residual": "add_biased"}),
        ("conv3d-rmsnorm-silu-pad", {"residual": "add", "history_frames": 2}),
        ("gated-attention-block", {"lse": True, "seq_lens": True, "fuse_gate": True}),
        ("gated-attention-block", {"fuse_norm_rope": True, "rope_dim": 0, "dtype": "fp16"}),
        ("gated-attention-block", {"quant": "fp8"}),
        ("gated-attention-block", {"quant": "mxfp8", "fuse_norm_rope": True, "fuse_gate": True}),
        ("dequantize-block", {"fmt": "nvfp4", "heads": 4}),
        ("gemm", {"dtype": "e4m3"}),
        ("qk-norm-rope", {"qk_norm": False}),
        ("qkv-gate-projection", {"fuse_norm_rope": True}),
        ("quantize-block", {"fmt": "mxfp8", "along_tokens": True, "seq_lens": True}),
        ("quantize-fp8", {"dtype": "fp16"}),
        ("rmsnorm-silu-pad", {"residual": "save_input", "input_bias": True, "history_frames": 1}),
        ("sdpa-fwd", {"keys": 99, "gate": True, "causal": False, "window_left": 7}),
    ],
)
def test_knobs_reach_the_plan(op, knobs):
    plain, changed = deploy({"op": op, **SMALLEST[op]}, {"op": op, **SMALLEST[op], **knobs}).plans
    plans = [request.plan("sm_90a") for request in (plain, changed)]
    assert all(plan.probe().served for plan in plans)
    assert plans[0].describe() != plans[1].describe()


@pytest.mark.parametrize(
    ("op", "codes", "decline"),
    [
        ("gemm", {"dtype": "e4m3"}, "False with torch.bfloat16 operands"),
        ("gated-attention-block", {"quant": "fp8"}, "False without quant"),
        ("gated-attention-block", {"quant": "mxfp8"}, "False without quant"),
    ],
)
def test_fast_accumulation_is_for_codes(op, codes, decline):
    knobs = {"fast_accumulation": True}
    (request,) = deploy({"op": op, **SMALLEST[op], **codes, **knobs}).plans
    assert "fast accumulation" in request.plan("sm_90a").describe()
    (request,) = deploy({"op": op, **SMALLEST[op], **knobs}).plans
    with pytest.raises(ContractError, match=f"fast_accumulation: expected {decline}"):
        request.plan("sm_90a").check_support()


def test_pins_are_passed_on():
    (request,) = deploy(
        {"op": "sdpa-fwd", **SMALLEST["sdpa-fwd"], "engines": {"sdpa": "portable"}}
    ).plans
    assert request.plan("sm_90a").probe().stages[0].engine == "portable"


def test_labels_are_names_or_places():
    plan = {"op": "gemm", **SMALLEST["gemm"]}
    assert deploy({**plan, "name": "up"}, plan).labels() == ["up", "gemm (plans[1])"]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("not json", "deploy.json: expected Invalid JSON"),
        ("{}", "plans: expected Field required"),
        ('{"plans": []}', "plans: expected List should have at least 1 item"),
        ('{"plans": [{"op": "fft"}]}', "plans.0: expected Input tag 'fft' found"),
        ('{"plans": [{"op": "gemm", "n": 8}]}', "plans.0.gemm.k: expected Field required"),
        ('{"plans": [{"op": "gemm", "n": 8, "k": "8"}]}', "plans.0.gemm.k: .*valid integer"),
        ('{"plans": [{"op": "gemm", "n": 8, "k": 8, "m": 8}]}', "plans.0.gemm.m: expected Extra"),
        ('{"plans": [{"op": "gemm", "n": 8, "k": 8}], "targets": ["sm_70"]}', "targets.0: "),
        ('{"plans": [{"op": "gemm", "n": 8, "k": 8, "dtype": "fp32"}]}', "plans.0.gemm.dtype: "),
    ],
)
def test_what_is_wrong_is_named_by_its_place(tmp_path, text, place):
    path = tmp_path / "deploy.json"
    path.write_text(text)
    with pytest.raises(ContractError, match=place):
        read_deploy_file(path)


@pytest.mark.parametrize(
    ("name", "schema"),
    [("deploy.schema.json", deploy_schema()), ("probe.schema.json", reports_schema())],
)
def test_the_published_schemas_are_those_of_the_models(name, schema):
    """``python -m cudnn_blocks schema deploy > docs/schema/deploy.schema.json`` writes one."""
    assert json.loads((SCHEMAS / name).read_text()) == schema


def test_the_schema_lists_every_op_and_forbids_unknown_fields():
    definitions = deploy_schema()["$defs"]
    ops = {
        one["properties"]["op"]["const"]
        for one in definitions.values()
        if "op" in one["properties"]
    }
    assert ops == set(SMALLEST)
    assert all(one["additionalProperties"] is False for one in definitions.values())
