# SPDX-License-Identifier: Apache-2.0
"""What the precision modes of the block refuse, by name and before any launch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from cudnn_blocks import (
    ContractError,
    Fp4Format,
    MxQuantSpec,
    NotServedError,
    QuantSpec,
)
from cudnn_blocks.target import GPU_TARGET_NAMES
from tests.helpers.gated_attention_precision import (
    BLOBS,
    D128,
    MODES,
    PrecisionProblem,
    make_precision_problem,
)
from tests.helpers.gated_attention_problem import make_problem
from tests.helpers.tensors import assert_same_bits

TARGETS = ("cpu", "sm_90a")
BLOCK_SCALED = [name for name, mode in MODES.items() if not mode.is_per_tensor]
FP8_SCALES = (
    "descale_h",
    "descale_w_qkvg",
    "descale_w_o",
    "scale_q",
    "scale_k",
    "scale_v",
    "scale_o",
)


def make(name: str, **options) -> PrecisionProblem:
    return make_precision_problem(MODES[name], **options)


def with_quant(problem: PrecisionProblem, **changes) -> PrecisionProblem:
    return dataclasses.replace(problem, quant=dataclasses.replace(problem.quant, **changes))


def assert_declined(problem, error, match, target="cpu", **knobs):
    plan = problem.to("meta").plan(target=target, **knobs)
    with pytest.raises(error, match=match):
        plan.check_support()
    report = problem.to("meta").plan(target=target, **knobs).probe()
    assert (report.served, report.decline_type) == (False, error.__name__)


def assert_call_refused(plan, problem, match, **changes):
    before = problem.clone()
    with pytest.raises(ContractError, match=match):
        problem.execute(plan, **changes)
    for name, tensor in problem.operands.items():
        if tensor is not None:
            assert_same_bits(tensor, before[name], name)


# Specs and knobs.


@pytest.mark.parametrize("name", [name for name in MODES if not name.endswith("fused")])
@pytest.mark.parametrize("knob", ["fuse_norm_rope", "fuse_gate"])
@pytest.mark.parametrize("target", TARGETS)
def test_one_fusion_knob_alone(name, knob, target):
    knobs = {"fuse_norm_rope": False, "fuse_gate": False, knob: True}
    match = "fuse_norm_rope=(True|False) with fuse_gate=(True|False) in .* both knobs or neither"
    assert_declined(make(name), NotServedError, match, target, **knobs)


@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_e5m2(name):
    problem = with_quant(make(name), dtype=torch.float8_e5m2)
    assert_declined(problem, NotServedError, "^quant: dtype=torch.float8_e5m2 is not served")
    if name == "mxfp8":
        weights = with_quant(make(name), w_qkvg_dtype=torch.float8_e5m2)
        assert_declined(weights, NotServedError, "^quant: w_qkvg_dtype=torch.float8_e5m2")


@pytest.mark.parametrize("field", FP8_SCALES)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_scales_outside_the_contract(field, value):
    assert_declined(with_quant(make("fp8"), **{field: value}), ContractError, f"^{field}: expected")


@pytest.mark.parametrize("name", ["nvfp4-output", "mxfp4-output"])
@pytest.mark.parametrize("field", ["scale_o", "descale_w_o"])
def test_scales_that_nothing_consumes(name, field):
    problem = with_quant(make(name), **{field: 2.0})
    assert_declined(problem, ContractError, f"^{field}: expected 1.0 with o_fp4")


@pytest.mark.parametrize("name", ["nvfp4-output", "mxfp4-output-fused"])
def test_fast_accumulation_that_nothing_consumes(name):
    problem = with_quant(make(name), fast_accumulation=True)
    assert_declined(problem, ContractError, "^fast_accumulation: expected False with o_fp4")


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("fp8", {"qkv_gate_proj", "out_proj"}),
        ("fp8-fused", {"qkv_gate_proj_norm_rope", "out_proj"}),
        ("mxfp8", {"out_proj"}),
        ("mxfp4-weights-fused", {"out_proj"}),
    ],
)
def test_fast_accumulation_reaches_the_products_of_codes(name, stages):
    for fast in (False, True):
        problem = with_quant(make(name), fast_accumulation=fast).to("meta")
        lines = problem.plan(target="sm_90a").describe().splitlines()
        found = {line.split(":")[0].strip() for line in lines if "fast accumulation" in line}
        assert found == (stages if fast else set())


def test_another_block_size():
    problem = with_quant(make("mxfp8"), block_size=16)
    assert_declined(problem, ContractError, "^block_size: expected 32, got 16")


@pytest.mark.parametrize("quant", [object(), "fp8", 8])
def test_specs_of_a_wrong_type(quant):
    with pytest.raises(TypeError, match="^quant: expected QuantSpec or MxQuantSpec"):
        make("fp8").plan(quant=quant)


# Targets.


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
@pytest.mark.parametrize("name", MODES)
def test_what_gpus_serve(name, target):
    """Every mode, by kernels of this package alone."""
    problem = make(name)
    report = problem.to("meta").plan(target=target).probe()
    assert report.served, report.decline
    for stage in report.stages:
        is_product = stage.stage == "sdpa" or "proj" in stage.stage
        best = "hopper" if is_product and target == "sm_90a" else "portable"
        assert stage.engine == best, stage.stage


# Sizes.


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "sizes", "match"),
    [
        ("mxfp8", {"d_model": 192}, "d_model=192 in mxfp8 is not served; served: multiples of 128"),
        ("mxfp8", {"d_head": 64}, "d_head=64 in mxfp8 is not served; served: multiples of 128"),
        ("mxfp4-output", {"d_head": 64}, "d_head=64 in mxfp8 is not served"),
    ],
)
def test_rows_that_hold_no_whole_tile_of_scales(name, sizes, match, target):
    one = dataclasses.replace(D128, **sizes)
    assert_declined(make(name, geometry=one), NotServedError, match, target)


# Samples.


@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_missing_scale_samples(name):
    problem = make(name)
    for blob in BLOBS:
        if blob in problem.operands:
            match = f"^sample_{blob}: expected a tensor, since quant is MXFP8"
            assert_declined(problem, ContractError, match, **{f"sample_{blob}": None})


@pytest.mark.parametrize("name", [None, *MODES])
def test_superfluous_scale_samples(name):
    problem = make_problem() if name is None else make(name)
    for blob in BLOBS:
        if blob not in problem.operands:
            extra = {f"sample_{blob}": torch.empty(512, dtype=torch.uint8, device="meta")}
            match = f"^sample_{blob}: expected None, since quant is "
            assert_declined(problem, ContractError, match, **extra)


@pytest.mark.parametrize("name", BLOCK_SCALED)
@pytest.mark.parametrize("change", ["shorter", "longer", "two axes"])
def test_blobs_of_another_size(name, change):
    problem = make(name, tokens=8)
    for blob in BLOBS:
        if blob in problem.operands:
            flat = problem[blob]
            other = {
                "shorter": flat[:-512] if len(flat) > 512 else flat[:-4],
                "longer": torch.cat([flat, flat[:512]]),
                "two axes": flat.view(-1, 4),
            }[change]
            assert_declined(problem.with_(**{blob: other}), ContractError, f"^{blob}: expected")


@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_blobs_of_another_dtype(name):
    problem = make(name)
    for blob in BLOBS:
        if blob in problem.operands:
            for dtype in (torch.int8, torch.float8_e5m2):
                other = problem.with_(**{blob: problem[blob].view(dtype)})
                assert_declined(other, ContractError, f"^{blob}: expected dtype torch.float8_")
    nvfp4 = make("nvfp4-output")
    wrong = nvfp4.with_(w_o_sf=nvfp4["w_o_sf"].view(torch.float8_e8m0fnu))
    assert_declined(wrong, ContractError, "^w_o_sf: expected dtype torch.float8_e4m3fn or torch.u")


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("operand", ["h", "w_qkvg", "w_o", "out", "cos", "w_q_norm"])
def test_samples_of_another_dtype(name, operand):
    problem = make(name)
    other = problem.with_(**{operand: torch.zeros(problem[operand].shape, dtype=torch.float16)})
    assert_declined(other, ContractError, f"^{operand}: expected dtype")


def test_codes_without_a_spec():
    problem = make("fp8")
    assert_declined(problem, ContractError, "^h: expected dtype torch.bfloat16", quant=None)


def test_unpacked_fp4_weights():
    """A row of W has half as many bytes as values."""
    problem = make("mxfp4-weights")
    unpacked = problem["w_qkvg"].view(torch.uint8).repeat_interleave(2, dim=1)
    match = r"^w_qkvg: expected shape \[1536, 64\]"
    assert_declined(problem.with_(w_qkvg=unpacked), ContractError, match)


# Calls.


@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4-output"])
def test_scale_operands_of_a_call(name):
    problem = make(name)
    plan = problem.compiled()
    for blob in BLOBS:
        if blob in problem.operands:
            assert_call_refused(plan, problem, f"^{blob}: expected a tensor", **{blob: None})
            longer = torch.cat([problem[blob]] * 2)
            assert_call_refused(plan, problem, f"{blob}: expected", **{blob: longer})
            other = problem[blob].view(torch.int8)
            assert_call_refused(plan, problem, f"^{blob}: expected dtype", **{blob: other})
        else:
            extra = torch.empty(512, dtype=torch.uint8)
            assert_call_refused(plan, problem, f"^{blob}: expected None", **{blob: extra})


@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_a_written_operand_over_a_blob(name):
    problem = make(name)
    plan = problem.compiled()
    workspace = problem.workspace(plan)
    for blob in BLOBS:
        if blob in problem.operands:
            inside = workspace[: problem[blob].numel()]
            with pytest.raises(ContractError, match="^workspace: expected memory of its own"):
                problem.execute(plan, workspace=workspace, **{blob: inside})


# Scales of a plan.


def test_scales_of_another_mode_are_not_taken():
    fp8, mx = make("fp8"), make("mxfp8")
    plan = fp8.compiled()
    with pytest.raises(ContractError, match="^quant: expected QuantSpec.* with other scales"):
        plan.update_quant_scales(mx.quant)
    with pytest.raises(ContractError, match="^quant: expected None with other scales"):
        make_problem().compiled().update_quant_scales(fp8.quant)
    with pytest.raises(TypeError, match="^quant: expected QuantSpec or MxQuantSpec"):
        plan.update_quant_scales(None)
    with pytest.raises(ContractError, match="^scale_q: expected"):
        plan.update_quant_scales(dataclasses.replace(fp8.quant, scale_q=0.0))
    for problem, own in ((fp8, plan), (mx, mx.compiled())):
        fast = dataclasses.replace(problem.quant, fast_accumulation=True)
        with pytest.raises(ContractError, match="^quant: .* with other scales"):
            own.update_quant_scales(fast)
    mx_plan = mx.compiled()
    for other in ({"o_fp4": Fp4Format.NVFP4, "descale_w_o": 1.0, "scale_o": 1.0},):
        with pytest.raises(ContractError, match="^quant: expected MxQuantSpec.* with other scales"):
            mx_plan.update_quant_scales(dataclasses.replace(mx.quant, **other))


def test_specs_are_values():
    assert QuantSpec(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0) == QuantSpec(*[1.0] * 7)
    with pytest.raises(TypeError, match=r"^QuantSpec\.scale_q"):
        QuantSpec(1.0, 1.0, 1.0, "1", 1.0, 1.0, 1.0)
    with pytest.raises(TypeError, match=r"^MxQuantSpec\.o_fp4"):
        MxQuantSpec(1.0, o_fp4="nvfp4")
