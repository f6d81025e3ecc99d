# SPDX-License-Identifier: Apache-2.0
"""The block in every precision mode on the reference engine: numbers, edges, scales, workspace."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from cudnn_blocks import GatedAttentionGeometry, QuantSpec
from cudnn_blocks.workspace import GuardedBuffer
from tests.helpers.gated_attention_precision import (
    BLOBS,
    D128,
    E2M1_X2,
    MODES,
    PrecisionProblem,
    assert_close_to_stated,
    cosine,
    make_precision_problem,
)
from tests.helpers.gated_attention_problem import READ
from tests.helpers.tensors import assert_same_bits
from tests.oracles import gated_attention_precision_reference as oracle

BLOCK_SCALED = [name for name, mode in MODES.items() if not mode.is_per_tensor]
SOME = ["fp8", "fp8-fused", "mxfp4-weights", "nvfp4-output-fused"]
"""One of each kind of operand and stage."""
PER_TENSOR = [name for name, mode in MODES.items() if mode.is_per_tensor]


def make(name: str, *sizes: int, geometry=D128, seed: int = 5, **options) -> PrecisionProblem:
    torch.manual_seed(seed)
    return make_precision_problem(MODES[name], geometry, *sizes, **options)


def geometry(**changes) -> GatedAttentionGeometry:
    return dataclasses.replace(D128, **changes)


@pytest.mark.parametrize("name", MODES)
def test_numbers(name):
    """Like the exact layer as a whole, and every element like the stated rounding points."""
    problem = make(name, 2, 40, seq_lens=[23, 40], has_lse=True, table_rows=50).run()
    exact, _ = problem.expected_at(None)
    assert cosine(problem["out"], exact) > problem.mode.cosine
    assert_close_to_stated(problem)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    "changes",
    [
        {"is_causal": False},
        {"window_left": 3},
        {"window_right": 2, "causal_bottom_right": True},
        {"qk_norm": False, "rope_dim": 128},
        {"rope_dim": 0, "attn_scale": 0.2},
        {"h_kv": 4},
        {"d_head": 256, "h_q": 2, "h_kv": 1},
    ],
    ids=str,
)
def test_geometries(name, changes):
    problem = make(name, 2, 9, geometry=geometry(**changes), seq_lens=[5, 9]).run()
    assert_close_to_stated(problem)


@pytest.mark.parametrize("name", PER_TENSOR)
def test_heads_of_64_channels(name):
    problem = make(name, 2, 9, geometry=geometry(d_head=64), has_lse=True).run()
    assert_close_to_stated(problem)


@pytest.mark.parametrize("name", MODES)
def test_one_wrong_block_does_not_hide(name):
    """The bound of every element catches one 32-wide block of one operand gone."""
    problem = make(name, 2, 40).run()
    broken = problem.with_(out=problem["out"].clone())
    broken["out"][0, 3, 32:64] = 0
    with pytest.raises(AssertionError, match="off by"):
        assert_close_to_stated(broken)


# Edges.


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("value", [math.nan, 448.0])
def test_nothing_past_the_length_reaches_a_row_before_it(name, value):
    """S14; V is scaled along the keys, and its scales do not see them either."""
    clean = make(name, 2, 8, seq_lens=[3, 8], has_lse=True)
    dirty = clean.clone()
    clean["h"][0, 3:] = 0
    dirty["h"][0, 3:] = value
    plan = clean.compiled()
    clean.execute(plan)
    dirty.execute(plan)
    assert bool(dirty["out"][0, :3].isfinite().all())
    assert_same_bits(dirty["out"][0, :3], clean["out"][0, :3], "rows before the length")
    assert_same_bits(dirty["lse"][0, :, :3], clean["lse"][0, :, :3], "their LSE")
    assert_same_bits(dirty["out"][1], clean["out"][1], "another entry")


@pytest.mark.parametrize("name", MODES)
def test_entries_without_a_key(name):
    problem = make(name, 3, 4, seq_lens=[0, 4, 0], has_lse=True).run()
    for entry in (0, 2):
        assert bool((problem["out"][entry] == 0).all())
        assert bool((problem["lse"][entry] == -math.inf).all())
    assert_close_to_stated(problem)


@pytest.mark.parametrize("name", MODES)
def test_an_empty_call(name):
    """S29: with a plan of its own and with a larger one."""
    larger = make(name, 2, 8, seq_lens=[8, 8])
    plan = larger.compiled()
    for batch, tokens in ((0, 8), (2, 0), (0, 0)):
        empty = make(name, batch, tokens, table_rows=8, seq_lens=[0] * batch).run()
        empty.execute(plan, workspace=larger.workspace(plan))
        assert empty["out"].shape == (batch, tokens, D128.d_model)


@pytest.mark.parametrize("name", SOME)
def test_a_plan_serves_every_smaller_call(name):
    large = make(name, 3, 16)
    plan = large.compiled()
    for batch, tokens in ((1, 16), (2, 5), (1, 1)):
        small = make(name, batch, tokens)
        alone = small.clone().run()
        served = small.clone().execute(plan, workspace=large.workspace(plan))
        assert_same_bits(served["out"], alone["out"], f"out of {batch} x {tokens}")


@pytest.mark.parametrize("name", MODES)
def test_nan_stays_in_its_entry(name):
    problem = make(name, 2, 40)
    clean = problem.clone().run()
    problem["h"][1, 39, 5] = math.nan
    problem.run()
    assert_same_bits(problem["out"][0], clean["out"][0], "another entry")
    first = 32 if name in BLOCK_SCALED else 39  # V of 32 keys shares a scale
    assert_same_bits(problem["out"][1, :first], clean["out"][1, :first], "rows before")
    assert bool(problem["out"][1, 39].isnan().all())


# Scale blobs.


@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_padding_of_blobs_is_neutral(name):
    problem = make(name, 2, 9)
    expected = problem.clone().run()["out"]
    sizes = {
        "h_sf": (18, D128.d_model // 32),
        "w_qkvg_sf": (D128.n_qkvg, D128.d_model // 32),
        "w_o_sf": (D128.d_model, D128.attn_width // (16 if "nvfp4" in name else 32)),
    }
    for blob in BLOBS:
        if blob in problem.operands:
            rows, columns = sizes[blob]
            is_used = oracle.make_blob(torch.ones(rows, columns, dtype=torch.uint8)).bool()
            problem[blob][~is_used] = 0xFF
    assert_same_bits(problem.run()["out"], expected, "out")


@pytest.mark.parametrize("name", [n for n in MODES if "output" in n])
def test_a_nan_scale_of_w_o_spoils_its_row_alone(name):
    problem = make(name, 1, 4)
    clean = problem.clone().run()["out"]
    nan = 0x7F if "nvfp4" in name else 0xFF
    columns = D128.attn_width // (16 if "nvfp4" in name else 32)
    problem["w_o_sf"][oracle.blob_offset(37, 2, columns)] = nan
    out = problem.run()["out"]
    assert bool(out[..., 37].isnan().all())
    others = torch.arange(D128.d_model) != 37
    assert_same_bits(out[..., others], clean[..., others], "other columns")


@pytest.mark.parametrize("name", BLOCK_SCALED)
def test_blobs_in_their_own_dtype(name):
    problem = make(name, 2, 9)
    expected = problem.clone().run()["out"]
    own = {b: torch.float8_e8m0fnu for b in BLOBS if b in problem.operands}
    if "nvfp4" in name:
        own["w_o_sf"] = torch.float8_e4m3fn
    typed = problem.with_(**{blob: problem[blob].view(dtype) for blob, dtype in own.items()})
    assert_same_bits(typed.run()["out"], expected, "out")


@pytest.mark.parametrize("name", ["mxfp4-weights", "nvfp4-output", "mxfp4-output-fused"])
def test_packed_codes_in_their_own_dtype(name):
    problem = make(name, 2, 9)
    expected = problem.clone().run()["out"]
    bytes_of = {n: t for n, t in problem.operands.items() if n in READ and t is not None}
    packed = {n: t.view(E2M1_X2) for n, t in bytes_of.items() if t.dtype == torch.uint8}
    assert packed
    assert_same_bits(problem.with_(**packed).run()["out"], expected, "out")


# Scales and workspace.


@pytest.mark.parametrize("name", ["fp8", "fp8-fused", "mxfp8", "mxfp8-fused"])
def test_new_scales_are_those_of_a_new_plan(name):
    problem = make(name, 2, 9)
    plan = problem.compiled()
    first = problem.clone().execute(plan)["out"]
    changes = {"scale_o": 61.0, "descale_w_o": problem.quant.descale_w_o * 1.5}
    if isinstance(problem.quant, QuantSpec):
        changes |= {"descale_h": 1 / 50, "descale_w_qkvg": problem.quant.descale_w_qkvg * 0.8}
        changes |= {"scale_q": 20.0, "scale_k": 31.0, "scale_v": 60.0}
    other = dataclasses.replace(problem, quant=dataclasses.replace(problem.quant, **changes))
    plan.update_quant_scales(other.quant)
    changed = problem.clone().execute(plan)["out"]
    assert_same_bits(changed, other.clone().run()["out"], "with other scales")
    assert not torch.equal(changed, first)
    plan.update_quant_scales(problem.quant)
    assert_same_bits(problem.clone().execute(plan)["out"], first, "with the first ones again")


def test_scales_may_change_before_the_plan_is_made():
    problem = make("fp8", 2, 9)
    other = dataclasses.replace(problem, quant=dataclasses.replace(problem.quant, scale_q=20.0))
    plan = problem.plan()
    plan.update_quant_scales(other.quant)
    plan.compile()
    assert_same_bits(problem.clone().execute(plan)["out"], other.clone().run()["out"], "out")


@pytest.mark.parametrize("name", MODES)
def test_the_workspace_is_exact_and_may_hold_anything(name):
    """S28."""
    problem = make(name, 2, 9, seq_lens=[9, 4], has_lse=True)
    plan = problem.compiled()
    expected = problem.clone()
    expected.execute(plan, workspace=problem.workspace(plan, fill=0))
    guarded = GuardedBuffer(plan.get_workspace_size(), torch.device("cpu"))
    guarded.bytes.fill_(0xFF)
    problem.execute(plan, workspace=guarded.bytes)
    assert guarded.is_intact()
    assert_same_bits(problem["out"], expected["out"], "out")
    with pytest.raises(ValueError, match="^workspace: expected"):
        problem.execute(plan, workspace=guarded.bytes[:-1])


@pytest.mark.parametrize("name", MODES)
def test_operands_that_are_only_read_stay_as_they_are(name):
    problem = make(name, 2, 8, seq_lens=[3, 8])
    before = problem.clone()
    problem.run()
    for operand in (*READ, "seq_lens", *BLOBS):
        if operand in problem.operands:
            assert_same_bits(problem[operand], before[operand], operand)


def test_modes_of_equal_shapes_keep_apart():
    """S22: plans of one shape in several modes, then in the other order."""
    alone = {name: make(name, 1, 8).run()["out"] for name in SOME}
    for name in reversed(SOME):
        assert_same_bits(make(name, 1, 8).run()["out"], alone[name], name)
    assert not torch.equal(alone["fp8"], alone["fp8-fused"])


@pytest.mark.parametrize("name", MODES)
def test_stages_of_codes_name_what_shows_that_they_ran(name):
    problem = make_precision_problem(MODES[name]).to("meta")
    on_values = {"qk_norm_rope", "sigmoid_gate"}  # BF16, as ever
    for stage in problem.plan(target="sm_90a").probe().stages:
        shown = "block" if stage.stage in on_values else "precision"
        files = (f"gated_attention_{shown}", "dequant_gemm")
        assert any(f"{file}.json" in stage.status for file in files), stage.stage
    for stage in problem.plan(target="sm_80").probe().stages:
        assert stage.status == "compile-only", stage.stage
