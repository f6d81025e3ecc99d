# SPDX-License-Identifier: Apache-2.0
"""What the block refuses, by name, before any launch: broken contracts and what none serves."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cudnn_blocks import (
    ContractError,
    GatedAttentionBlockFwd,
    GatedAttentionGeometry,
    GradModeError,
    NotServedError,
)
from cudnn_blocks.target import GPU_TARGET_NAMES, TARGET_NAMES
from tests.helpers.gated_attention_problem import KNOBS, SMALL, make_problem
from tests.helpers.tensors import assert_same_bits


def meta_plan(problem, target, **knobs):
    return problem.to("meta").plan(target=target, **knobs)


def assert_refused(plan, problem, error, match, **changes):
    before = problem.clone()
    with pytest.raises(error, match=match):
        problem.execute(plan, **changes)
    for name, tensor in problem.operands.items():
        if tensor is not None:
            assert_same_bits(tensor, before[name], name)


# What is inside the contract and not served.


@pytest.mark.parametrize(
    ("knobs", "missing"),
    [
        ({"save_for_backward": True}, "save_for_backward=True"),
        ({"inplace_qkv": False}, "inplace_qkv=False"),
        ({"inplace_qkv": True, "save_for_backward": True}, "save_for_backward=True"),
    ],
)
@pytest.mark.parametrize("target", ["cpu", "sm_90a"])
def test_modes_of_other_versions(knobs, missing, target):
    plan = meta_plan(make_problem(), target, **knobs)
    match = f"^gated-attention-block: {missing} is not served"
    with pytest.raises(NotServedError, match=match):
        plan.check_support()
    with pytest.raises(NotServedError, match=match):
        plan.compile()
    report = meta_plan(make_problem(), target, **knobs).probe()
    assert (report.served, report.decline_type) == (False, "NotServedError")


@pytest.mark.parametrize("inplace_qkv", [None, True])
def test_in_place_is_the_way_that_is_served(inplace_qkv):
    assert make_problem().plan(inplace_qkv=inplace_qkv).check_support()


def test_operands_of_other_versions():
    problem = make_problem()
    match = "^gated-attention-block: saved is not served"
    assert_refused(problem.compiled(), problem, NotServedError, match, saved=torch.empty(1))


@pytest.mark.parametrize("name", ["h_sf", "w_qkvg_sf", "w_o_sf"])
def test_scale_factors_that_nothing_declared(name):
    problem = make_problem()
    match = f"^{name}: expected None, since it was not declared"
    assert_refused(problem.compiled(), problem, ContractError, match, **{name: torch.empty(1)})


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
def test_head_sizes_that_no_kernel_serves(knobs, target):
    one = GatedAttentionGeometry(128, 4, 4, 96, rope_dim=32)
    with pytest.raises(NotServedError, match=r"d_head=96 \(served: 64, 128, 256"):
        meta_plan(make_problem(one), target, **knobs).check_support()
    assert make_problem(one).run(**knobs)["out"].isfinite().all()  # the contract has no such limit


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
def test_sizes_that_no_vector_fits(target):
    one = GatedAttentionGeometry(132, 4, 4, 64, rope_dim=32)
    with pytest.raises(NotServedError, match=r"^qkv_gate_proj: .*k=132 \(served: multiples of 8"):
        meta_plan(make_problem(one), target).check_support()


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_a_fused_norm_that_no_epilogue_serves_is_not_run_unfused(target):
    """A head size of the separate stage alone: the knob declines and names itself."""
    one = GatedAttentionGeometry(128, 2, 2, 192, rope_dim=32)
    plan = meta_plan(make_problem(one), target, fuse_norm_rope=True)
    if target == "cpu":
        assert plan.check_support()
        return
    with pytest.raises(NotServedError, match="^qkv_gate_proj_norm_rope: .*normed_d_head=192"):
        plan.check_support()


# Pins.


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_portable_serves_every_stage_everywhere(target, knobs):
    plan = meta_plan(make_problem(), target, **knobs)
    stages = [stage.stage for stage in plan.probe().stages]
    pinned = meta_plan(make_problem(), target, **knobs, engines=dict.fromkeys(stages, "portable"))
    assert {stage.engine for stage in pinned.probe().stages} == {"portable"}


def test_a_pin_holds_for_its_stage_alone():
    plan = meta_plan(make_problem(), "sm_90a", engines={"sdpa": "portable"})
    engines = {stage.stage: stage.engine for stage in plan.probe().stages}
    assert engines["sdpa"] == "portable"
    assert engines["qkv_gate_proj"] == engines["out_proj"] == "hopper"


@pytest.mark.parametrize("stage", ["qkv_gate_proj", "sdpa", "out_proj"])
def test_a_pin_that_cannot_serve_declines(stage):
    plan = meta_plan(make_problem(), "sm_80", engines={stage: "hopper"})
    with pytest.raises(NotServedError, match=f"^{stage}: hopper: target=sm_80 "):
        plan.check_support()


@pytest.mark.parametrize(
    ("knobs", "stage"),
    [
        ({}, "qkv_gate_proj_norm_rope"),
        ({"fuse_norm_rope": True}, "qk_norm_rope"),
        ({"fuse_gate": True}, "sigmoid_gate"),
        ({}, "sdpa_gated"),
    ],
)
def test_pins_of_stages_that_the_knobs_leave_out(knobs, stage):
    plan = meta_plan(make_problem(), "sm_90a", **knobs, engines={stage: "portable"})
    with pytest.raises(ContractError, match="^engines: expected stage names among"):
        plan.check_support()


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
def test_the_reference_is_never_taken_for_a_gpu(target):
    plan = meta_plan(make_problem(), target, engines={"sdpa": "reference"})
    with pytest.raises(NotServedError, match=rf"reference: target={target} \(served: cpu\)"):
        plan.check_support()


# Broken contracts, at construction.


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"h_q": 3, "h_kv": 2}, "^h_q: expected a multiple"),
        ({"rope_dim": 7}, "^rope_dim: expected an even number"),
        ({"rope_dim": 66}, "^rope_dim: expected an even number from 0 to d_head = 64, got 66"),
        ({"window_right": 2, "is_causal": False}, "^window_right: expected"),
    ],
)
def test_geometries_outside_the_contract(changes, match):
    problem = make_problem()
    bad = dataclasses.replace(problem, geometry=dataclasses.replace(SMALL, **changes))
    with pytest.raises(ContractError, match=match):
        bad.plan().check_support()
    assert bad.plan().probe().decline_type == "ContractError"


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("h", (2, 8, 64), r"^h: expected shape \[B, S, 128\]"),
        ("h", (16, 128), r"^h: expected shape \[B, S, 128\]"),
        ("w_qkvg", (512, 128), r"^w_qkvg: expected shape \[768, 128\]"),
        ("w_q_norm", (128,), r"^w_q_norm: expected shape \[64\]"),
        ("cos", (2, 7, 16), r"^cos: expected at least S = 8 rows, got 7 rows"),
        ("sin", (2, 7, 16), r"^sin: expected shape \[B = 2, T = 8, 16\]"),
        ("cos", (2, 8, 64), r"^cos: expected shape \[B = 2, T = 8, 16\]"),
        ("cos", (1, 8, 16), r"^cos: expected shape \[B = 2, T, 16\]"),
        ("w_o", (256, 128), r"^w_o: expected shape \[128, 256\]"),
        ("out", (2, 9, 128), r"^out: expected shape \[B = 2, S = 8, 128\]"),
    ],
)
def test_samples_of_another_shape(name, shape, match):
    problem = make_problem()
    changed = {name: torch.zeros(shape, dtype=torch.bfloat16)}
    if match.startswith("^cos: expected at least"):
        changed["sin"] = changed["cos"]
    with pytest.raises(ContractError, match=match):
        problem.with_(**changed).plan().check_support()


@pytest.mark.parametrize("name", ["h", "w_qkvg", "cos", "out"])
def test_samples_of_another_dtype(name):
    problem = make_problem()
    other = problem.with_(**{name: problem[name].half()})
    with pytest.raises(ContractError, match="expected dtype"):
        other.plan().check_support()


def test_fp32_is_outside_the_contract():
    problem = make_problem(dtype=torch.float32)
    match = r"^h: expected dtype torch\.bfloat16 or torch\.float16, got torch\.float32"
    with pytest.raises(ContractError, match=match):
        problem.plan().check_support()


@pytest.mark.parametrize(
    ("changes", "names"),
    [({"qk_norm": False}, ["w_q_norm", "w_k_norm"]), ({"rope_dim": 0}, ["cos", "sin"])],
)
def test_samples_that_the_geometry_has_or_has_no_use_for(changes, names):
    without = make_problem(dataclasses.replace(SMALL, **changes))
    full = make_problem()
    for name in names:
        extra = without.with_(**{name: full[name]})
        with pytest.raises(ContractError, match=f"^sample_{name}: expected None, since"):
            extra.plan().check_support()
        missing = full.with_(**{name: None})
        with pytest.raises(ContractError, match=f"^sample_{name}: expected a tensor, since"):
            missing.plan().check_support()


@pytest.mark.parametrize(
    "flag", ["return_lse", "save_for_backward", "seq_lens_present", "fuse_norm_rope", "fuse_gate"]
)
def test_flags_are_booleans(flag):
    with pytest.raises(TypeError, match=f"^{flag}: expected bool, got int"):
        make_problem().plan(**{flag: 1})


def test_samples_and_geometry_of_a_wrong_type():
    problem = make_problem()
    with pytest.raises(TypeError, match="^geometry: expected GatedAttentionGeometry"):
        dataclasses.replace(problem, geometry={"d_model": 128}).plan()
    for name in ("h", "w_qkvg", "w_o", "out"):
        with pytest.raises(TypeError, match=f"^sample_{name}: expected Tensor or TensorSpec"):
            problem.with_(**{name: None}).plan()
        with pytest.raises(TypeError, match=f"^sample_{name}: expected Tensor or TensorSpec"):
            problem.with_(**{name: [1.0]}).plan()


# Broken contracts, in a call.


def test_tables_that_end_before_the_last_token():
    """S19: right with 8 rows for 8 tokens, refused with 8 rows for 9."""
    problem = make_problem(SMALL, 1, 9)
    plan = problem.compiled()
    short = problem.with_(cos=problem["cos"][:, :8], sin=problem["sin"][:, :8])
    assert_refused(plan, short, ContractError, "^cos: expected at least S = 9 rows, got 8 rows")
    eight = short.with_(h=problem["h"][:, :8], out=problem["out"][:, :8])
    assert bool(eight.execute(plan)["out"].isfinite().all())
    with pytest.raises(ContractError, match="^cos: expected at least S = 9 rows, got 8 rows"):
        short.plan().check_support()


@pytest.mark.parametrize("name", ["seq_lens", "lse"])
def test_declared_and_missing_or_given_and_undeclared(name):
    options = {"seq_lens": [8, 8], "has_lse": True}
    full = make_problem(**options)
    options.pop("has_lse" if name == "lse" else name)
    without = make_problem(**options)
    match = f"^{name}: expected a tensor, as declared at construction, got None"
    assert_refused(full.compiled(), full, ContractError, match, **{name: None})
    match = f"^{name}: expected None, since it was not declared, got a tensor"
    assert_refused(without.compiled(), without, ContractError, match, **{name: full[name]})


def test_lengths_and_lse_of_another_kind():
    problem = make_problem(seq_lens=[8, 8], has_lse=True)
    plan = problem.compiled()
    lens, lse = problem["seq_lens"], problem["lse"]
    for changes, match in (
        ({"seq_lens": lens.long()}, "^seq_lens: expected dtype torch.int32"),
        ({"seq_lens": lens[:1]}, r"^seq_lens: expected shape \[B = 2\]"),
        ({"seq_lens": lens.repeat_interleave(2)[::2]}, "^seq_lens: expected contiguous"),
        ({"lse": lse.bfloat16()}, "^lse: expected dtype torch.float32"),
        ({"lse": lse[:, :2]}, r"^lse: expected shape \[B = 2, 4, S = 8\]"),
        ({"lse": lse.transpose(1, 2).contiguous().transpose(1, 2)}, "^lse: expected contiguous"),
    ):
        assert_refused(plan, problem, ContractError, match, **changes)


@pytest.mark.parametrize("name", ["h", "out"])
def test_rows_that_are_not_at_one_pitch(name):
    problem = make_problem()
    plan = problem.compiled()
    wide = torch.zeros(2, 9, 256, dtype=torch.bfloat16)
    for bad in (
        wide[:, :8, :128],  # the batch stride is nine rows
        wide.view(-1).as_strided((2, 8, 128), (8 * 132, 132, 1)),  # 132 % 8 == 4
        wide.view(-1).as_strided((2, 8, 128), (8 * 64, 64, 1)),  # rows overlap
        wide.view(-1).as_strided((2, 8, 128), (8 * 256, 256, 2)),
        wide.view(-1).as_strided((2, 8, 128), (0, 128, 1)),
    ):
        match = rf"^{name}: expected strides \(8 \* ld, ld, 1\) with ld = 128, or larger"
        assert_refused(plan, problem, ContractError, match, **{name: bad})


def test_tables_of_other_strides():
    problem = make_problem()
    plan = problem.compiled()
    backing = torch.zeros(2 * 8 * 32 + 8, dtype=torch.bfloat16)
    odd = backing.as_strided((2, 8, 16), (8 * 17, 17, 1))
    assert_refused(plan, problem, ContractError, r"^cos: expected strides \(\.\.\., 1\)", cos=odd)
    split = backing.as_strided((2, 8, 16), (256, 32, 2))
    assert_refused(plan, problem, ContractError, r"^sin: expected strides \(\.\.\., 1\)", sin=split)


def test_larger_calls_than_the_samples():
    plan = make_problem(SMALL, 2, 8, table_rows=64).compiled()
    for batch, tokens, symbol in ((3, 8, "B"), (2, 9, "S")):
        larger = make_problem(SMALL, batch, tokens, table_rows=64)
        match = f"^{symbol}: expected at most"
        assert_refused(plan, larger, ContractError, match)


@pytest.mark.parametrize("inside", ["h", "w_q_norm", "cos", "out"])
def test_a_workspace_over_an_operand(inside):
    problem = make_problem()
    plan = problem.compiled()
    workspace, tensor = problem.workspace(plan), problem[inside]
    place = workspace[-tensor.numel() * tensor.element_size() :]
    over = place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    match = f"^workspace: expected memory of its own, apart from {inside}"
    with pytest.raises(ContractError, match=match):
        problem.execute(plan, workspace=workspace, **{inside: over})


def test_the_block_is_inference_only():
    problem = make_problem()
    plan = problem.compiled()
    weight = problem["w_o"].clone().requires_grad_()
    with pytest.raises(GradModeError, match="^w_o: requires grad while grad mode is on"):
        problem.execute(plan, w_o=weight)
    with torch.no_grad():
        same = problem.clone().execute(plan, w_o=weight)["out"]
    assert_same_bits(same, problem.execute(plan)["out"], "out")


def test_probe_of_the_class_says_the_same_as_the_plan():
    problem = make_problem().to("meta")
    samples = [problem.operands[name] for name in ("h", "w_qkvg", "w_q_norm", "w_k_norm", "cos")]
    samples += [problem.operands[name] for name in ("sin", "w_o", "out")]
    for target in TARGET_NAMES:
        report = GatedAttentionBlockFwd.probe(*samples, SMALL, target=target)
        assert report == problem.plan(target=target).probe()
        assert report.served
