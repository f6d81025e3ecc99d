# SPDX-License-Identifier: Apache-2.0
"""Values at the edge: SiLU, infinities, NaN that must stay in its row, order of rounding."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.conv1d_problem import STATE_FORMS, assert_matches, expect, make_problem
from tests.helpers.tensors import assert_same_bits, clone_exact

pytestmark = pytest.mark.gpu
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def through_silu(values: torch.Tensor):
    """A problem whose accumulators are exactly ``values``."""
    problem = make_problem(
        1, values.numel(), 2, 1, dtype=values.dtype, device="cuda", activation="silu"
    )
    problem.conv_state.zero_()
    problem.weight.copy_(torch.tensor([0.0, 1.0]))
    problem.x.copy_(values)
    return problem


@dtypes
def test_silu_of_every_finite_value(dtype):
    """All of them: finite, one rounding from the formula, -1000 and the largest included."""
    everything = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype)
    finite = everything[everything.isfinite()]
    problem = through_silu(finite)
    expected = expect(problem)
    out = problem.run().out
    assert bool(out.isfinite().all())
    assert_matches(problem, expected)
    assert bool((out[finite.unsqueeze(0) < -200] == 0).all())


@dtypes
def test_silu_of_infinities_and_nan(dtype):
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0], dtype=dtype, device="cuda")
    out = through_silu(special).run().out[0].tolist()
    assert out[0] == math.inf
    assert math.isnan(out[1])
    assert math.isnan(out[2])
    assert out[3:] == [0.0, 0.0]


@dtypes
def test_identity_lets_everything_through(dtype):
    special = [math.inf, -math.inf, math.nan, 1.0, 65504.0, -65504.0, 2.0**-24, 0.0]
    values = torch.tensor(special, dtype=dtype, device="cuda")
    problem = through_silu(values).with_(activation=None)
    expected = expect(problem)
    assert_matches(problem.run(), expected)


def test_large_accumulators_are_finite_through_silu():
    """Products far past the largest FP16 value, and -1e30 in BF16."""
    problem = make_problem(2, 64, device="cuda", activation="silu")
    problem.x.fill_(1e15)
    problem.weight.fill_(-1e15)
    problem.conv_state.fill_(1e15)
    out = problem.run().out
    assert bool((out == 0).all())


def test_a_nan_stays_in_its_row_and_channel():
    problem = make_problem(9, 520, device="cuda", has_bias=True, activation="silu")
    clean = problem.clone().run()
    problem.x[4, 17] = math.nan
    problem.conv_state[7, 100, 2] = math.inf
    done = problem.run()
    bad = torch.zeros(9, 520, dtype=torch.bool, device="cuda")
    bad[4, 17] = bad[7, 100] = True
    assert bool((~done.out[4, 17].isfinite()).all())
    masked = torch.where(bad, 0, done.out)
    assert_same_bits(masked, torch.where(bad, 0, clean.out), "everything else")


@pytest.mark.parametrize("on_bad_index", ["trap", "report"])
@pytest.mark.parametrize(("width", "state_len", "layout"), STATE_FORMS)
def test_padding_rows(width, state_len, layout, on_bad_index):
    """S02: NaN in x of the padding, NaN in the output before; zeros come out, no slot changes."""
    problem = make_problem(
        *(6, 520, width, state_len, layout),
        device="cuda",
        has_bias=True,
        activation="silu",
        indices=[5, -1, 0, -1, -1, 2],
        num_slots=7,
        on_bad_index=on_bad_index,
    )
    problem.x[problem.indices == -1] = math.nan
    before, expected = clone_exact(problem.conv_state), expect(problem)
    done = problem.run()
    assert_matches(done, expected)
    assert_same_bits(done.out[[1, 3, 4]], torch.zeros(3, 520, dtype=torch.bfloat16), "padding rows")
    assert_same_bits(done.conv_state[[1, 3, 4, 6]], before[[1, 3, 4, 6]], "slots nobody names")


def test_a_batch_of_padding_alone():
    problem = make_problem(5, 520, device="cuda", indices=[-1] * 5, num_slots=2)
    problem.x.fill_(math.nan)
    before = clone_exact(problem.conv_state)
    done = problem.run()
    assert_same_bits(done.out, torch.zeros_like(done.out), "out")
    assert_same_bits(done.conv_state, before, "state")


def test_padding_with_no_slots():
    problem = make_problem(5, 520, device="cuda", indices=[-1] * 5, num_slots=0)
    assert not problem.run().out.any()


@pytest.mark.parametrize("activation", ["identity", "silu"])
def test_one_rounding_and_no_more(activation):
    """Sums that a BF16 intermediate would lose: 256 + 1 - 256."""
    problem = make_problem(1, 8, device="cuda", has_bias=True, activation=activation)
    problem.conv_state.fill_(256)
    problem.x.fill_(-256)
    problem.weight.copy_(torch.tensor([0.0, 1.0, 0.00390625, 1.0]))
    problem.bias.fill_(0.5)
    out = problem.run().out
    acc = torch.tensor(1.5)
    exact = acc if activation == "identity" else torch.nn.functional.silu(acc)
    assert_same_bits(out, exact.to(torch.bfloat16).expand(1, 8), "out")


@pytest.mark.parametrize("spelling", [(None, "identity"), ("silu", "swish")])
def test_two_spellings_are_one_specialisation(spelling):
    problem = make_problem(5, 520, device="cuda")
    first, second = (problem.clone().with_(activation=name).run() for name in spelling)
    assert_same_bits(first.out, second.out, "out")
