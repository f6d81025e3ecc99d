# SPDX-License-Identifier: Apache-2.0
"""The block on a GPU against the reference: knobs, head sizes, dtypes, lengths, what is masked."""

from __future__ import annotations

import math

import pytest
import torch

from cudnn_blocks import GatedAttentionGeometry
from cudnn_blocks.blocks import gated_attention
from tests.helpers.gated_attention_gpu import (
    CUDA,
    GEOMETRIES,
    KERNELS,
    LARGEST,
    assert_matches,
    compiled_block,
    expected,
    problem_of,
    run,
)
from tests.helpers.gated_attention_problem import KNOBS, assert_close, make_problem
from tests.helpers.tensors import assert_same_bits, clone_exact

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]  # the first test of a kernel compiles it
knobs_axis = pytest.mark.parametrize("knobs", KNOBS, ids=str)
name_axis = pytest.mark.parametrize("name", list(GEOMETRIES))
FUSED = KNOBS[-1]


@name_axis
@knobs_axis
def test_end_to_end(name, knobs):
    plan = compiled_block(name, **knobs)
    for tokens, lengths in ((300, [300, 131, 0]), (1024, [1, 1024, 700]), (65, [64, 65, 63])):
        problem = problem_of(name, 3, tokens, seq_lens=lengths, **knobs)
        assert_matches(run(plan, problem), problem, f"{tokens} tokens")


@knobs_axis
@pytest.mark.parametrize("name", ["d64", "d256"])
def test_end_to_end_on_portable_kernels(name, knobs):
    plan = compiled_block(name, "portable", **knobs)
    assert {stage.engine for stage in plan.probe().stages} == {"portable"}
    for tokens, lengths in ((300, [300, 131]), (129, [0, 128])):
        problem = problem_of(name, 2, tokens, seq_lens=lengths, **knobs)
        assert_matches(run(plan, problem), problem, f"{tokens} tokens")


@name_axis
def test_one_plan_serves_every_smaller_call(name):
    plan = compiled_block(name, **FUSED)
    for batch in (1, 3):
        for tokens in (1, 2, 7, 63, 64, 65, 127, 128, 129, 255, 257, 1023):
            problem = problem_of(name, batch, tokens, **FUSED)
            assert_matches(run(plan, problem), problem, f"{batch} x {tokens}")


@name_axis
@pytest.mark.parametrize("fuse_norm_rope", [False, True])
def test_a_fused_gate_changes_no_bit(name, fuse_norm_rope):
    problem = problem_of(name, 2, 300, seq_lens=[300, 77])
    separate, fused = (
        run(compiled_block(name, fuse_norm_rope=fuse_norm_rope, fuse_gate=fuse_gate), problem)
        for fuse_gate in (False, True)
    )
    assert_same_bits(fused["out"], separate["out"], "out")
    assert_same_bits(fused["lse"], separate["lse"], "lse")


@pytest.mark.parametrize("name", ["d64", "d256"])
@knobs_axis
def test_one_host_call_gives_the_bits_of_a_call_per_stage(name, knobs, monkeypatch):
    problem = problem_of(name, 2, 200, seq_lens=[200, 77], **knobs)
    at_once = compiled_block(name, **knobs)
    assert at_once._one_call is not None
    monkeypatch.setattr(gated_attention, "can_launch_at_once", lambda stages: False)
    per_stage = problem_of(name, *LARGEST, **knobs).compiled()
    assert per_stage._one_call is None
    a, b = run(at_once, problem), run(per_stage, problem)
    assert_same_bits(a["out"], b["out"], "out")
    assert_same_bits(a["lse"], b["lse"], "lse")


@name_axis
@pytest.mark.parametrize("knobs", [KNOBS[0], FUSED], ids=str)
def test_the_same_bits_every_time_whatever_the_workspace_holds(name, knobs):
    plan = compiled_block(name, **knobs)
    problem = problem_of(name, 3, 333, seq_lens=[333, 0, 100], **knobs)
    first = run(plan, problem)
    for fill in (0, 0x7F, 0xFF):
        again = run(plan, problem, workspace=problem.workspace(plan, fill))
        assert_same_bits(again["out"], first["out"], "out")
        assert_same_bits(again["lse"], first["lse"], "lse")


@pytest.mark.parametrize("engine", KERNELS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("knobs", [KNOBS[0], FUSED], ids=str)
def test_nothing_past_the_length_reaches_a_row_before_it(engine, value, knobs):
    """S14: also where the length lies inside a block of keys, or the tail fills whole blocks."""
    plan = compiled_block("d256", engine, **knobs)
    for length in (3, 64, 100, 255):
        clean = problem_of("d256", 2, 256, seq_lens=[length, 256], **knobs)
        dirty = clean.clone()
        clean["h"][0, length:] = 0
        dirty["h"][0, length:] = value
        a, b = run(plan, clean), run(plan, dirty)
        assert bool(b["out"][0, :length].isfinite().all())
        assert_same_bits(b["out"][0, :length], a["out"][0, :length], "out")
        assert_same_bits(b["lse"][0, :, :length], a["lse"][0, :, :length], "lse")
        assert_same_bits(b["out"][1], a["out"][1], "another entry")
        assert bool(b["out"][0, length:].isnan().all()), "a query row past the length is ordinary"


@pytest.mark.parametrize("engine", KERNELS)
@pytest.mark.parametrize("knobs", [KNOBS[0], FUSED], ids=str)
def test_entries_without_a_key(engine, knobs):
    """S15: no hang, zero whatever the gate, and the same every time."""
    plan = compiled_block("d256", engine, **knobs)
    problem = problem_of("d256", 3, 4, seq_lens=[0, 4, 0], **knobs)
    for _ in range(20):
        result = run(plan, problem)
        assert_matches(result, problem)
        assert bool((result["out"][::2] == 0).all())
        assert bool((result["lse"][::2] == -math.inf).all())


@knobs_axis
def test_rows_that_see_no_key(knobs):
    """Bottom-right with short lengths; the geometry's windows and lengths make dead rows."""
    plan = compiled_block("d256-fp16", **knobs)
    for lengths in ([5, 300, 299], [0, 1, 130]):
        problem = problem_of("d256-fp16", 3, 300, seq_lens=lengths, **knobs)
        result = run(plan, problem)
        assert_matches(result, problem, f"{lengths}")
        for entry, length in enumerate(lengths):
            assert bool((result["out"][entry, : 300 - length] == 0).all())


@pytest.mark.parametrize(
    "geometry",
    [
        GatedAttentionGeometry(256, 4, 1, 64, rope_dim=64, is_causal=False, window_left=40),
        GatedAttentionGeometry(256, 14, 2, 64, rope_dim=32, window_left=70, window_right=9),
        GatedAttentionGeometry(256, 3, 1, 128, rope_dim=2, qk_norm=False, attn_scale=0.02),
        GatedAttentionGeometry(256, 5, 5, 128, rope_dim=0, qk_norm_eps=0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("knobs", [KNOBS[0], FUSED], ids=str)
def test_other_geometries(geometry, knobs):
    problem = make_problem(geometry, 2, 257, device=CUDA, seq_lens=[257, 99], has_lse=True, **knobs)
    assert_matches(run(problem.compiled(), problem), problem)


@pytest.mark.parametrize(("batch", "tokens"), [(2, 33), (3, 1), (1, 70), (1, 1)])
def test_rows_of_a_wider_array_and_shared_tables(batch, tokens):
    plan = compiled_block("d256", **FUSED)
    problem = problem_of("d256", batch, tokens, table_rows=100, **FUSED)
    plain = run(plan, problem)
    wide_h, wide_out = (torch.full((batch, tokens, 600), 7.0, device=CUDA).bfloat16() for _ in "ab")
    h, out = wide_h[..., 16:528], wide_out[..., 8:520]
    h.copy_(problem["h"])
    tables = {n: problem[n][:1].expand(batch, -1, -1) for n in ("cos", "sin")}
    problem.with_(h=h, out=out, **tables).execute(plan)
    assert_same_bits(out, plain["out"], "out")
    assert bool((wide_out[..., :8] == 7).all())
    assert bool((wide_out[..., 520:] == 7).all())


def test_fused_norm_and_rope_are_nearer_to_the_exact_result():
    """Rounded once instead of twice: against FP32 inputs of the attention."""
    problem = problem_of("d256", 2, 500, **FUSED)
    exact, _ = expected(problem)
    unfused = run(compiled_block("d256", **KNOBS[0]), problem.with_knobs(**KNOBS[0]))
    fused = run(compiled_block("d256", **FUSED), problem)
    assert_close(unfused["out"], exact, "unfused")
    assert_close(fused["out"], exact, "fused")
    assert not torch.equal(fused["out"], unfused["out"])


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_qwen3_next_at_its_sizes(tokens):
    geometry = GatedAttentionGeometry(2048, 16, 2, 256, rope_dim=64)
    problem = make_problem(geometry, 1, tokens, device=CUDA, **FUSED)
    result = run(problem.compiled(), problem)
    out, _ = expected(problem)
    for rows in out.split(2048, dim=1):
        start = rows.storage_offset() // geometry.d_model
        part = slice(start, start + rows.shape[1])
        assert_close(result["out"][:, part], rows, f"rows {part}")


def test_operands_that_are_only_read_stay_as_they_are():
    for knobs in KNOBS:
        problem = problem_of("d256", 2, 70, seq_lens=[3, 70], **knobs)
        before = {n: clone_exact(t) for n, t in problem.operands.items() if t is not None}
        problem.execute(compiled_block("d256", **knobs))
        for name in set(before) - {"out", "lse"}:
            assert_same_bits(problem[name], before[name], name)
