# SPDX-License-Identifier: Apache-2.0
"""The block end to end on the reference engine: knobs, dtypes, masks, and rows that see nothing."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from cudnn_blocks import GatedAttentionGeometry
from cudnn_blocks.reference.gated_attention import gated_attention
from tests.helpers.gated_attention_problem import (
    DTYPES,
    KNOBS,
    READ,
    SMALL,
    assert_close,
    make_problem,
    rope_tables,
)
from tests.helpers.tensors import assert_same_bits

knobs_and_dtypes = pytest.mark.parametrize(
    ("knobs", "dtype"), [(knobs, dtype) for knobs in KNOBS for dtype in DTYPES], ids=str
)


def geometry(**changes) -> GatedAttentionGeometry:
    return dataclasses.replace(SMALL, **changes)


@knobs_and_dtypes
def test_end_to_end_against_the_oracle(knobs, dtype):
    problem = make_problem(SMALL, 2, 13, dtype=dtype, has_lse=True, **knobs).run()
    expected = problem.expected()
    assert_close(problem["out"], expected.out, "out")
    torch.testing.assert_close(
        problem["lse"].double(), expected.lse, atol=16 * torch.finfo(dtype).eps, rtol=0
    )


@knobs_and_dtypes
def test_the_bits_are_those_of_the_composed_reference(knobs, dtype):
    problem = make_problem(SMALL, 2, 13, dtype=dtype, seq_lens=[5, 13], has_lse=True, **knobs)
    out, lse = gated_attention(
        *(problem.operands[name] for name in READ),
        SMALL,
        seq_lens=problem["seq_lens"],
        fuse_norm_rope=knobs["fuse_norm_rope"],
    )
    problem.run()
    assert_same_bits(problem["out"], out, "out")
    assert_same_bits(problem["lse"], lse, "lse")


@pytest.mark.parametrize("fuse_norm_rope", [False, True])
def test_a_fused_gate_changes_no_bit(fuse_norm_rope):
    problem = make_problem(SMALL, 2, 13, seq_lens=[3, 13], fuse_norm_rope=fuse_norm_rope)
    separate = problem.clone().run(fuse_gate=False)
    fused = problem.clone().run(fuse_gate=True)
    assert_same_bits(fused["out"], separate["out"], "out")


@pytest.mark.parametrize(
    "changes",
    [
        {"qk_norm": False},
        {"rope_dim": 0},
        {"rope_dim": 64},
        {"is_causal": False},
        {"causal_bottom_right": True},
        {"window_left": 2, "window_right": 1},
        {"attn_scale": 0.4},
        {"h_q": 6, "h_kv": 3},
        {"h_q": 6, "h_kv": 1},
        {"h_q": 14, "h_kv": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_other_geometries(changes, knobs):
    one = geometry(**changes)
    problem = make_problem(one, 2, 7, seq_lens=[4, 7], **knobs).run()
    assert_close(problem["out"], problem.expected().out, "out")


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_causal", [True, False])
def test_nothing_past_the_length_reaches_a_row_before_it(knobs, value, is_causal):
    """S14: tokens at or past the length hold NaN or infinities, keys and values with them."""
    one = geometry(is_causal=is_causal)
    clean = make_problem(one, 2, 8, seq_lens=[3, 8], has_lse=True, **knobs)
    dirty = clean.clone()
    clean["h"][0, 3:] = 0
    dirty["h"][0, 3:] = value
    clean.run()
    dirty.run()
    for name, rows in (("out", dirty["out"][0, :3]), ("lse", dirty["lse"][0, :, :3])):
        part = clean["out"][0, :3] if name == "out" else clean["lse"][0, :, :3]
        assert bool(rows.isfinite().all())
        assert_same_bits(rows, part, name)
    assert_same_bits(dirty["out"][1], clean["out"][1], "another entry")
    assert bool(dirty["out"][0, 3:].isnan().all()), "a query row past the length is ordinary"


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_entries_without_a_key(knobs):
    """S15: zero before and after the gate, whatever the gate; 20 times the same."""
    problem = make_problem(SMALL, 3, 4, seq_lens=[0, 4, 0], has_lse=True, **knobs)
    plan = problem.compiled()
    runs = [problem.clone().execute(plan) for _ in range(20)]
    for run in runs:
        for entry in (0, 2):
            assert bool((run["out"][entry] == 0).all())
            assert bool((run["lse"][entry] == -math.inf).all())
        assert_same_bits(run["out"], runs[0]["out"], "out")
    assert_close(runs[0]["out"][1], problem.expected().out[1], "out")


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_rows_that_see_no_key(knobs):
    """Bottom-right with a short length: the first rows' diagonal lies before the first key."""
    one = geometry(causal_bottom_right=True)
    problem = make_problem(one, 2, 6, seq_lens=[2, 6], has_lse=True, **knobs).run()
    expected = problem.expected()
    assert bool((problem["out"][0, :4] == 0).all())
    assert bool((problem["lse"][0, :, :4] == -math.inf).all())
    assert_close(problem["out"], expected.out, "out")


@pytest.mark.parametrize("lengths", [[-1, -(2**31)], [8, 2**31 - 1]])
def test_lengths_out_of_range_are_clamped(lengths):
    inside = [0, 0] if lengths[0] < 0 else [8, 8]
    problem = make_problem(SMALL, 2, 8, seq_lens=lengths)
    clamped = problem.with_(seq_lens=torch.tensor(inside, dtype=torch.int32)).clone().run()
    assert_same_bits(problem.run()["out"], clamped["out"], "out")


def test_a_plan_serves_every_smaller_call():
    large = make_problem(SMALL, 3, 16, seq_lens=[16, 16, 16], has_lse=True)
    plan = large.compiled()
    for batch, tokens in ((3, 16), (1, 16), (2, 5), (3, 1), (1, 1)):
        small = make_problem(SMALL, batch, tokens, seq_lens=[tokens] * batch, has_lse=True)
        alone = small.clone().run()
        served = small.clone()
        served.execute(plan, workspace=large.workspace(plan))
        assert_same_bits(served["out"], alone["out"], f"out of {batch} x {tokens}")
        assert_same_bits(served["lse"], alone["lse"], f"lse of {batch} x {tokens}")


@pytest.mark.parametrize(("batch", "tokens"), [(0, 8), (2, 0), (0, 0)])
def test_an_empty_call(batch, tokens):
    """S29: with a plan of its own and with a larger one."""
    empty = make_problem(SMALL, batch, tokens, table_rows=8, seq_lens=[0] * batch, has_lse=True)
    empty.run()
    larger = make_problem(SMALL, 2, 8, seq_lens=[8, 8], has_lse=True)
    plan = larger.compiled()
    empty.execute(plan, workspace=larger.workspace(plan))
    assert empty["out"].shape == (batch, tokens, SMALL.d_model)


def test_tables_may_be_longer_and_shared_by_all_entries():
    problem = make_problem(SMALL, 3, 8)
    expected = problem.clone().run()["out"]
    cos, sin = rope_tables(1, 30, SMALL.rope_dim, torch.bfloat16, "cpu")
    shared = problem.with_(cos=cos.expand(3, -1, -1), sin=sin.expand(3, -1, -1))
    plan = problem.compiled()
    assert_same_bits(shared.execute(plan)["out"], expected, "out")
    wide = torch.cat([cos, sin], -1).expand(3, -1, -1)
    cos, sin = wide[..., : SMALL.rope_dim], wide[..., SMALL.rope_dim :]
    assert_same_bits(problem.with_(cos=cos, sin=sin).execute(plan)["out"], expected, "out")


@pytest.mark.parametrize(("batch", "tokens"), [(2, 5), (3, 1), (1, 4), (1, 1)])
def test_rows_of_a_wider_array(batch, tokens):
    problem = make_problem(SMALL, batch, tokens)
    expected = problem.clone().run()["out"]
    wide_h, wide_out = (torch.full((batch, tokens, 200), 7.0).bfloat16() for _ in range(2))
    h, out = wide_h[..., 16:144], wide_out[..., 8:136]
    h.copy_(problem["h"])
    problem.with_(h=h, out=out).run()
    assert_same_bits(out, expected, "out")
    assert bool((wide_out[..., :8] == 7).all())
    assert bool((wide_out[..., 136:] == 7).all())


def test_windows_show_exactly_what_they_say():
    """S17: equal scores and V row j = e_j, so that the output lists the keys that were seen."""
    tokens = 6
    for left in (0, 1, 2, tokens - 1, tokens, -1):
        one = GatedAttentionGeometry(64, 1, 1, 64, rope_dim=0, qk_norm_eps=1.0, window_left=left)
        problem = make_problem(one, 1, tokens, dtype=torch.float16)
        problem["w_qkvg"].zero_()
        problem["w_qkvg"][192:] = torch.eye(64)  # V is h; Q and K are zero, and so is the gate
        problem["w_o"].copy_(2 * torch.eye(64))  # against the gate of 1/2
        problem["h"].copy_(torch.eye(tokens, 64))
        out = problem.run()["out"][0, :, :tokens].float()
        for row in range(tokens):
            first = 0 if left < 0 else max(0, row - left)
            seen = torch.zeros(tokens)
            seen[first : row + 1] = 1 / (row + 1 - first)
            torch.testing.assert_close(out[row], seen, atol=1e-3, rtol=0)


def test_scores_far_below_any_stand_in_for_minus_infinity():
    """S16: every visible score is about -1.6e5, which is a mean over the visible values."""
    one = GatedAttentionGeometry(64, 1, 1, 64, rope_dim=2, qk_norm=False, attn_scale=1.0)
    problem = make_problem(one, 2, 4, dtype=torch.bfloat16, seq_lens=[4, 0])
    w = problem["w_qkvg"]
    w.zero_()
    w[:64, 0], w[128:192, 0] = 50, -50  # Q = 50, K = -50 in every channel
    w[64:128, 1] = 100  # an open gate
    w[192:, 2] = 1  # V row j = j
    problem["h"].zero_()
    problem["h"][..., 0] = problem["h"][..., 1] = 1
    problem["h"][..., 2] = torch.arange(4)
    problem["cos"].fill_(1)
    problem["sin"].fill_(0)
    problem["w_o"].copy_(torch.eye(64))
    out = problem.run()["out"]
    assert out[0, :, 0].tolist() == [0, 0.5, 1, 1.5]
    assert bool((out[1] == 0).all())


def test_the_gate_belongs_to_its_head():
    """S20: gates of head 0 at -100 close it, those of head 1 at 0 halve it."""
    one = geometry(h_q=2, h_kv=2)
    problem = make_problem(one, 1, 4)
    problem["h"][..., 0] = 1
    w = problem["w_qkvg"]
    w[128:256] = 0
    w[128:192, 0] = -100
    problem["w_o"].copy_(torch.eye(128))
    expected = problem.expected()
    out = problem.run()["out"][0].float()
    assert bool((out[:, :64].abs() < 1e-30).all())
    half = expected.o[0, :, 1] / 2
    torch.testing.assert_close(out[:, 64:].double(), half, atol=4e-3, rtol=2**-7)


def test_large_gates_are_finite():
    problem = make_problem(SMALL, 1, 4)
    problem["w_qkvg"][256:512] *= 1e4
    out = problem.run()["out"]
    assert bool(out.isfinite().all())


def test_operands_that_are_only_read_stay_as_they_are():
    problem = make_problem(SMALL, 2, 8, seq_lens=[3, 8])
    before = problem.clone()
    problem.run()
    for name in (*READ, "seq_lens"):
        assert_same_bits(problem[name], before[name], name)


@pytest.mark.parametrize("fill", [0, 0xFF, 0x7F])
def test_the_workspace_may_hold_anything(fill):
    problem = make_problem(SMALL, 2, 8)
    expected = problem.clone().run()["out"]
    plan = problem.compiled()
    problem.execute(plan, workspace=problem.workspace(plan, fill))
    assert_same_bits(problem["out"], expected, "out")
