# SPDX-License-Identifier: Apache-2.0
"""Attention of e4m3 codes on a GPU: rounding, exact sums, lengths, NaN codes, any scores."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.helpers.sdpa_gpu import (
    CUDA,
    D_HEADS,
    ENGINES,
    check,
    compiled_plan,
    plan_options,
)
from tests.helpers.sdpa_problem import CODES, make_problem
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
engines = pytest.mark.parametrize("engine", ENGINES)
head_sizes = pytest.mark.parametrize("d_head", D_HEADS)
MODES = {
    "causal": {},
    "full-codes": {"is_causal": False, "o_dtype": CODES},
    "gate": {"has_gate": True, "heads": (3, 1)},
    "gate-codes-band": {
        "has_gate": True,
        "o_dtype": CODES,
        "causal_bottom_right": True,
        "window_left": 100,
        "window_right": 3,
    },
}
modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
SIZES = ((2, 300, 300), (1, 1, 1), (1, 1, 77), (3, 129, 257), (1, 1000, 333), (2, 255, 128))


def run(engine, problem, **options):
    plan = compiled_plan(engine, **plan_options({"dtype": CODES, **options}))
    return problem.clone().run(plan)


@engines
@head_sizes
@modes
def test_against_the_reference(mode, d_head, engine):
    for index, (b, s, sk) in enumerate(SIZES):
        options = {"dtype": CODES, "d_head": d_head, **mode}
        if index % 2:
            options["seq_lens"] = [(0, sk, sk // 2)[i % 3] for i in range(b)]
        torch.manual_seed(index)
        check(engine, b, s, sk, **options)


@engines
@head_sizes
@modes
def test_equal_scores_add_up_exactly(mode, d_head, engine):
    """Weights of 256 and small integers: every key and channel is in its place."""
    options = {"dtype": CODES, "d_head": d_head, **mode}
    for s, sk in ((300, 300), (129, 400), (500, 260)):
        problem = make_problem(1, s, sk, device=CUDA, **options)
        problem["k"].zero_()
        key = torch.arange(sk, device=CUDA)[:, None, None]
        channel = torch.arange(d_head, device=CUDA)
        head = torch.arange(problem.geometry.h_kv, device=CUDA)[None, :, None]
        pattern = 7 * key + 3 * channel + 5 * head + key // 16 * (channel // 8)
        problem["v"].copy_(((pattern % 15) - 7).float().to(CODES))
        expected, actual = problem.expected(), run(engine, problem, **options)
        wanted = expected["o"].float()
        error = (actual["o"].float() - wanted).abs()
        roundoff = 2.0**-3 if actual["o"].dtype == CODES else 2.0**-7
        assert (error <= roundoff * wanted.abs() + 2.0**-9).all(), f"{s} {sk}"
        torch.testing.assert_close(actual["lse"], expected["lse"], rtol=1e-6, atol=2e-5)


@engines
@head_sizes
def test_the_tail_never_leaks(d_head, engine):
    options = {"d_head": d_head, "has_gate": True}
    for lens, is_causal in itertools.product(((3, 200), (130, 64), (0, 199)), (True, False)):
        options |= {"seq_lens": lens, "is_causal": is_causal}
        problem, results = make_problem(2, 200, device=CUDA, dtype=CODES, **options), []
        for code in (0x00, 0x7F, 0xFF, 0x7E):
            for name, entry in itertools.product(("k", "v"), range(2)):
                problem[name].view(torch.uint8)[entry, lens[entry] :] = code
            results.append(run(engine, problem, **options))
        for other, name in itertools.product(results[1:], ("o", "lse")):
            assert_same_bits(other[name], results[0][name], f"{lens} {name}")


@engines
@head_sizes
def test_nan_codes_reach_what_sees_them(d_head, engine):
    """A query its row and head, a key the rows that see it, a value its channel of those."""
    options = {"d_head": d_head}
    problem = make_problem(1, 260, device=CUDA, dtype=CODES, **options)
    clean = run(engine, problem, **options)["o"][0]
    places = {"q": (0, 77, 1, 5), "k": (0, 100, 0, 3), "v": (0, 100, 0, 3)}
    for name, place in places.items():
        dirty = problem.clone()
        dirty[name].view(torch.uint8)[place] = 0x7F
        o = run(engine, dirty, **options)["o"][0]
        hit = torch.zeros_like(o, dtype=torch.bool)
        if name == "q":
            hit[77, 1] = True
        elif name == "k":
            hit[100:, :2] = True
        else:
            hit[100:, :2, 3] = True
        may_hit = hit.clone()
        if name == "v":
            may_hit[:, :2, 3] = True  # rows of a tile that has rows which see it
        assert torch.isnan(o[hit].float()).all(), name
        assert_same_bits(o[~may_hit], clean[~may_hit], name)


@engines
@head_sizes
def test_scores_of_any_size(d_head, engine):
    """Equal scores, however large: a mean; one far above the others: its value."""
    options = {"d_head": d_head}
    for value, scale in ((448.0, 1.0), (448.0, 1e-8), (2.0**-9, 1e-3)):
        problem = make_problem(1, 300, device=CUDA, dtype=CODES, **options)
        for name, sign in (("q", 1), ("k", -1)):
            problem[name].copy_(torch.full_like(problem[name].float(), sign * value).to(CODES))
        problem.scales["descale_q"] = scale
        plan = problem.compiled(engines={"sdpa": engine})
        actual, expected = problem.clone().run(plan), problem.expected()
        assert torch.isfinite(actual["o"]).all()
        error = (actual["o"].float() - expected["o"].float()).abs().max()
        largest = problem["v"].float().abs().max() * problem.scales["descale_v"]
        assert error <= 0.07 * largest
    problem = make_problem(1, 260, device=CUDA, dtype=CODES, **options)
    for key in (0, 127, 128, 200):
        problem["q"].copy_(torch.ones_like(problem["q"].float()).to(CODES))
        problem["k"].zero_()
        problem["k"][:, key] = torch.full((d_head,), 64.0, device=CUDA).to(CODES)
        o = run(engine, problem, **options)["o"][0, key:]
        value = problem["v"][0, key].float() * problem.scales["descale_v"]
        wanted = value.bfloat16().repeat_interleave(2, 0).expand_as(o)
        torch.testing.assert_close(o, wanted, rtol=2.0**-7, atol=1e-3)


@engines
def test_a_plan_takes_new_scales_between_launches(engine):
    options = {"d_head": 128}
    problem = make_problem(2, 100, device=CUDA, dtype=CODES, **options)
    plan = problem.compiled(engines={"sdpa": engine})
    first = problem.clone().run(plan)["o"]
    plan._stages[0].descale_v *= 2
    assert_same_bits(problem.clone().run(plan)["o"], first * 2, "o")
