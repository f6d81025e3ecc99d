# SPDX-License-Identifier: Apache-2.0
"""Attention on hard values: masked tails, extreme scores, rows without a key, the gate's bits."""

from __future__ import annotations

import math

import pytest
import torch

from cudnn_blocks import ops
from tests.helpers.sdpa_gpu import (
    CUDA,
    D_HEADS,
    ENGINES,
    check,
    check_problem,
    compiled_plan,
    plan_options,
)
from tests.helpers.sdpa_problem import make_problem
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
engines = pytest.mark.parametrize("engine", ENGINES)
head_sizes = pytest.mark.parametrize("d_head", D_HEADS)
masks = pytest.mark.parametrize(
    "mask",
    [{}, {"is_causal": False}, {"causal_bottom_right": True, "window_left": 40}],
    ids=["causal", "full", "band"],
)


def run(engine, problem, **options):
    copy = problem.clone()
    copy.run(compiled_plan(engine, **plan_options(options)))
    return copy


@engines
@head_sizes
@masks
def test_the_tail_never_leaks(mask, d_head, engine):
    """S14: bit for bit what zeros there give; the other entries too."""
    options = {"d_head": d_head, "heads": (4, 2), "has_gate": True, **mask}
    for lens in ((3, 200), (130, 64), (0, 199)):
        options["seq_lens"] = lens
        problem = make_problem(2, 200, device=CUDA, **options)
        for name in ("k", "v"):
            for entry, length in enumerate(lens):
                problem[name][entry, length:] = 0
        clean = run(engine, problem, **options)
        for bad in (math.nan, math.inf, -math.inf):
            for name in ("k", "v"):
                for entry, length in enumerate(lens):
                    problem[name][entry, length:] = bad
            dirty = run(engine, problem, **options)
            for name in ("o", "lse"):
                assert_same_bits(dirty[name], clean[name], f"{bad} {lens} {name}")


@engines
@head_sizes
def test_padded_query_rows_are_ordinary(d_head, engine):
    """NaN in the query rows past a length stays in those rows."""
    options = {"d_head": d_head, "heads": (2, 1), "seq_lens": (50, 100)}
    problem = make_problem(2, 100, device=CUDA, **options)
    clean = run(engine, problem, **options)
    problem["q"][0, 60:] = math.nan
    dirty = run(engine, problem, **options)
    assert torch.isnan(dirty["o"][0, 60:]).all()
    assert torch.isnan(dirty["lse"][0, :, 60:]).all()
    for name, axis in (("o", 0), ("lse", 1)):
        kept = dirty[name][0].narrow(axis, 0, 60), clean[name][0].narrow(axis, 0, 60)
        assert_same_bits(*kept, name)
        assert_same_bits(dirty[name][1], clean[name][1], name)


@engines
@head_sizes
def test_extreme_logits(d_head, engine):
    """S16: logits of -1.6e5; rows are means of the values they see, exactly."""
    q = torch.full((2, 4, 2, d_head), 400.0, dtype=torch.bfloat16, device=CUDA)
    v = torch.arange(4.0, device=CUDA).view(1, 4, 1, 1).expand(2, 4, 2, d_head).bfloat16()
    options = {"d_head": d_head, "heads": (2, 2), "has_gate": True, "attn_scale": 1 / d_head}
    options["seq_lens"] = (4, 0)
    problem = make_problem(2, 4, device=CUDA, **options)
    problem = problem.with_(q=q, k=-q, v=v, gate=torch.full_like(q, 100.0))
    got = run(engine, problem, **options)
    wanted = torch.tensor([0.0, 0.5, 1.0, 1.5], device=CUDA)
    assert torch.equal(got["o"][0].float(), wanted.view(4, 1, 1).expand(4, 2, d_head))
    assert torch.equal(got["o"][1], torch.zeros_like(got["o"][1]))
    assert (got["lse"][1] == -math.inf).all()
    torch.testing.assert_close(
        got["lse"][0, 0], -1.6e5 + torch.log(torch.arange(1.0, 5.0, device=CUDA)), rtol=1e-6, atol=0
    )


PROFILES = {
    "falling": lambda keys: -0.9 * keys,
    "rising": lambda keys: 0.9 * keys,
    "steps of 2**8": lambda keys: 8 * math.log(2) * (keys // 64),
    "just below 2**8 a block": lambda keys: 7.99 * math.log(2) * (keys // 64),
    "one key far above": lambda keys: torch.where(keys == 130, 200.0, 0.0),
    "one key far below": lambda keys: torch.where(keys == 299, -300.0, 0.0),
    "zigzag": lambda keys: 30.0 * (keys % 2) - keys / 8,
    "far below zero": lambda keys: -3e4 - keys,
}


@engines
@head_sizes
@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_of_scores(profile, d_head, engine):
    """The maximum grows, falls and jumps along the keys, across the edges of blocks."""
    for dtype in (torch.bfloat16, torch.float16):
        options = {"d_head": d_head, "heads": (2, 1), "dtype": dtype, "attn_scale": 1.0}
        problem = make_problem(1, 300, device=CUDA, **options)
        q, k = torch.zeros_like(problem["q"]), torch.zeros_like(problem["k"])
        # A score is the sum of a coarse and a fine part, so that BF16 keys hold it well.
        scores = PROFILES[profile](torch.arange(300.0, device=CUDA))
        coarse = scores.to(dtype)
        q[..., :2] = 1.0
        k[0, :, 0, 0] = coarse
        k[0, :, 0, 1] = (scores - coarse.float()).to(dtype)
        q[..., 2:] = 0.1 * problem["q"][..., 2:]
        k[..., 2:] = 0.1 * problem["k"][..., 2:]
        problem = problem.with_(q=q, k=k)
        check_problem(engine, problem, plan_options(options), f"{engine} {profile} {dtype}")


@engines
@head_sizes
@masks
def test_the_gate_has_the_bits_of_the_gate_op(mask, d_head, engine):
    for dtype in (torch.bfloat16, torch.float16):
        options = {"d_head": d_head, "heads": (4, 2), "dtype": dtype, **mask}
        problem = make_problem(2, 333, device=CUDA, has_gate=True, **options)
        problem["gate"].mul_(8)
        problem["gate"][0, 0, 0, :8] = torch.tensor(
            [0.0, -0.0, 100.0, -100.0, math.inf, -math.inf, 1e4, -1e4], device=CUDA
        )
        fused = run(engine, problem, has_gate=True, **options)
        plain = run(engine, problem.with_(gate=None), **options)
        separate = ops.sigmoid_gate(plain["o"], problem["gate"])
        assert_same_bits(fused["o"], separate, f"{dtype} {mask}")
        assert_same_bits(fused["lse"], plain["lse"], "lse")


@engines
@head_sizes
def test_operands_that_are_not_asked_for_change_no_bit(d_head, engine):
    """With and without an LSE, and with lengths that hide nothing."""
    options = {"d_head": d_head, "heads": (4, 2)}
    problem = make_problem(2, 200, device=CUDA, **options)
    wanted = run(engine, problem, **options)
    alone = run(engine, problem.with_(lse=None), has_lse=False, **options)
    assert_same_bits(alone["o"], wanted["o"], "no lse")
    lens = torch.full((2,), 200, dtype=torch.int32, device=CUDA)
    bounded = run(engine, problem.with_(seq_lens=lens), seq_lens=(200, 200), **options)
    for name in ("o", "lse"):
        assert_same_bits(bounded[name], wanted[name], f"full lengths {name}")


@engines
@head_sizes
@masks
def test_bands_of_a_slab(mask, d_head, engine):
    options = {"d_head": d_head, "heads": (4, 2), "has_gate": True, **mask}
    problem = make_problem(3, 190, device=CUDA, is_slab=True, **options)
    copies = problem.with_(**{n: problem[n].contiguous() for n in ("q", "k", "v", "gate")})
    got, wanted = (run(engine, one, **options) for one in (problem, copies))
    for name in ("o", "lse"):
        assert_same_bits(got[name], wanted[name], name)


@engines
def test_other_strides(engine):
    """Heads first, heads far apart, a batch that repeats; an output inside a wider array."""
    options = {"d_head": 64, "heads": (4, 2)}
    problem = make_problem(2, 130, device=CUDA, **options)
    wanted = run(engine, problem, **options)
    heads_first = {
        n: problem[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("q", "k", "v", "o")
    }
    wide = torch.full((2, 130, 9, 72), math.nan, dtype=torch.bfloat16, device=CUDA)
    for changes in (heads_first, {"o": wide[:, :, 2:6, :64]}):
        moved = problem.with_(**changes)
        moved.run(compiled_plan(engine, **plan_options(options)))
        assert_same_bits(moved["o"], wanted["o"], str(list(changes)))
    assert torch.isnan(wide[:, :, :2]).all()
    assert torch.isnan(wide[:, :, 6:]).all()
    assert torch.isnan(wide[..., 64:]).all()
    repeated = {n: problem[n][:1].expand(2, -1, -1, -1) for n in ("q", "k", "v")}
    again = problem.with_(**repeated, o=torch.empty_like(problem["o"]))
    again.run(compiled_plan(engine, **plan_options(options)))
    for entry in range(2):
        assert_same_bits(again["o"][entry], wanted["o"][0], "repeated")


@engines
@pytest.mark.parametrize("window", [1, 2, 6, 7])
def test_a_window_counts_the_keys_left_of_the_diagonal(window, engine):
    """S17: row i sees max(0, i - window) to i."""
    options = {"d_head": 64, "heads": (1, 1), "window_left": window}
    problem = make_problem(1, 6, device=CUDA, **options)
    q, v = torch.zeros_like(problem["q"]), torch.zeros_like(problem["v"])
    v[0, torch.arange(6), 0, torch.arange(6)] = 1.0
    o = run(engine, problem.with_(q=q, k=q, v=v), **options)["o"]
    for i in range(6):
        seen = (o[0, i, 0] > 0).nonzero().flatten().tolist()
        assert seen == list(range(max(0, i - window), i + 1))


@engines
@head_sizes
def test_values_that_leave_the_range_of_fp16_before_the_division(d_head, engine):
    """Sums of thousands of weights near 2**8 times large values."""
    options = {"d_head": d_head, "heads": (1, 1), "dtype": torch.float16, "is_causal": False}
    problem = make_problem(1, 2, 4096, device=CUDA, **options)
    problem["v"].copy_(problem["v"].abs() * 1000 + 1000)
    check_problem(engine, problem, plan_options(options), f"{engine} large values")


@engines
@head_sizes
def test_one_entry_keeps_its_infinities(d_head, engine):
    """What is not finite in one batch entry or head stays there."""
    options = {"d_head": d_head, "heads": (4, 2)}
    problem = make_problem(2, 150, device=CUDA, **options)
    clean = run(engine, problem, **options)
    problem["v"][0, 70, 0] = math.inf
    problem["k"][0, 20, 1] = math.nan
    dirty = run(engine, problem, **options)
    assert_same_bits(dirty["o"][1], clean["o"][1], "the other entry")
    assert torch.equal(dirty["lse"][0, :2], clean["lse"][0, :2])
    assert_same_bits(dirty["o"][0, :20, 2:], clean["o"][0, :20, 2:], "rows before the NaN key")
    assert torch.isnan(dirty["o"][0, 20:, 2:]).all()


@engines
def test_the_default_plan_of_the_device(engine):
    problem = check(engine, 2, 77, heads=(4, 2), d_head=64)
    o, lse = ops.sdpa_fwd(problem["q"], problem["k"], problem["v"], return_lse=True)
    if engine == ENGINES[0]:
        assert_same_bits(o, problem["o"], "o")
        assert_same_bits(lse, problem["lse"], "lse")
