# SPDX-License-Identifier: Apache-2.0
"""The reference of the causal conv1d update against things that share no code with it."""

from __future__ import annotations

import math

import pytest
import torch

from cudnn_blocks import BadSlotError
from cudnn_blocks.reference.causal_conv1d import causal_conv1d_update, find_faults
from tests.helpers.conv1d_problem import STATE_FORMS, make_problem, ulp_distance
from tests.helpers.tensors import assert_same_bits, bits, clone_exact, random_bits
from tests.oracles.causal_conv1d_update_reference import full_causal_conv, update_by_fp64_loop

BF16, FP16 = torch.bfloat16, torch.float16


def reference(problem, *, use_silu=False):
    causal_conv1d_update(*problem.operands.values(), use_silu=use_silu)
    return problem


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("use_silu", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("width", "state_len", "layout"), STATE_FORMS)
@pytest.mark.parametrize("indices", [None, [4, -1, 0]])
def test_against_an_fp64_loop(dtype, use_silu, has_bias, width, state_len, layout, indices):
    problem = make_problem(
        *(3, 5, width, state_len, layout),
        dtype=dtype,
        has_bias=has_bias,
        indices=indices,
        num_slots=6,
    )
    out, state = update_by_fp64_loop(
        problem.x,
        problem.conv_state,
        problem.weight,
        problem.bias,
        indices or [0, 1, 2],
        use_silu=use_silu,
    )
    done = reference(problem, use_silu=use_silu)
    expected = torch.tensor(out).to(dtype)
    assert int(ulp_distance(done.out, expected).max()) <= 1
    torch.testing.assert_close(done.out.double(), torch.tensor(out).double(), rtol=2**-8, atol=1e-6)
    assert done.conv_state.tolist() == state


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("width", "state_len", "layout"), STATE_FORMS)
def test_token_by_token_equals_the_full_convolution(dtype, has_bias, width, state_len, layout):
    num_tokens = 9
    problem = make_problem(3, 5, width, state_len, layout, dtype=dtype, has_bias=has_bias)
    problem.conv_state.zero_()
    tokens = torch.randn(num_tokens, 3, 5).to(dtype)
    expected = full_causal_conv(tokens, problem.weight, problem.bias)
    for t in range(num_tokens):
        done = reference(problem.with_(x=tokens[t]))
        assert int(ulp_distance(done.out, expected[t].to(dtype)).max()) <= 1
    assert_same_bits(problem.conv_state, tokens[-state_len:].permute(1, 2, 0), "state")


@pytest.mark.parametrize(
    ("state", "expected"), [([1000.0, 1, 2, 3], [1.0, 2, 3, 4]), ([1.0, 2, 3], [2.0, 3, 4])]
)
def test_the_newest_tokens_meet_the_filter(state, expected):
    """S01 (a) and (b): a window from the front of the longer state would give 1040."""
    problem = make_problem(1, 1, 4, len(state)).with_(
        x=torch.tensor([[4.0]], dtype=BF16),
        conv_state=torch.tensor([[state]], dtype=BF16),
        weight=torch.tensor([[1.0, 2, 4, 8]], dtype=BF16),
    )
    done = reference(problem)
    assert done.out.item() == 49.0
    assert done.conv_state.flatten().tolist() == expected


def silu_of(value: float, dtype: torch.dtype) -> float:
    problem = make_problem(1, 1, 2, 1, dtype=dtype)
    problem.conv_state.zero_()
    problem.weight.copy_(torch.tensor([[0.0, 1.0]]))
    problem.x.fill_(value)
    return reference(problem, use_silu=True).out.item()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_silu_follows_its_formula_at_the_edges(dtype):
    assert silu_of(math.inf, dtype) == math.inf
    assert math.isnan(silu_of(-math.inf, dtype))
    assert math.isnan(silu_of(math.nan, dtype))
    assert math.copysign(1, silu_of(0.0, dtype)) == 1
    assert silu_of(-0.0, dtype) == 0
    assert silu_of(-1000.0, dtype) == 0
    assert silu_of(1000.0, dtype) == 1000
    assert silu_of(1.0, dtype) == torch.tensor(1 / (1 + math.exp(-1))).to(dtype).item()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_silu_is_finite_for_every_finite_input(dtype):
    everything = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    finite = everything[everything.isfinite()].unsqueeze(0)
    channels = finite.shape[1]
    problem = make_problem(1, channels, 2, 1, dtype=dtype).with_(x=finite)
    problem.conv_state.zero_()
    problem.weight.copy_(torch.tensor([0.0, 1.0]))
    out = reference(problem, use_silu=True).out
    assert bool(out.isfinite().all())
    exact = finite.double() * torch.sigmoid(finite.double())
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=2.0**-24)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("width", "state_len", "layout"), STATE_FORMS)
def test_states_move_bit_for_bit(dtype, width, state_len, layout):
    problem = make_problem(64, 8, width, state_len, layout, dtype=dtype)
    problem.conv_state.copy_(random_bits((64, 8, state_len), dtype, "cpu"))
    problem = problem.with_(x=random_bits((64, 8), dtype, "cpu"))
    history = torch.cat([bits(problem.conv_state), bits(problem.x).unsqueeze(2)], dim=2)
    assert problem.x.isnan().any()
    assert_same_bits(
        reference(problem).conv_state.contiguous().view(torch.int16), history[:, :, 1:], "state"
    )


def test_padding_rows_are_zero_whatever_x_is():
    problem = make_problem(3, 8, indices=[0, -1, -1], num_slots=2)
    problem.x[1:] = math.nan
    before = clone_exact(problem.conv_state)
    done = reference(problem)
    assert_same_bits(done.out[1:], torch.zeros(2, 8, dtype=BF16), "out of the padding")
    assert_same_bits(done.conv_state[1], before[1], "the slot that nobody names")
    assert not torch.equal(done.conv_state[0], before[0])


def test_a_batch_of_padding_changes_nothing():
    problem = make_problem(2, 8, indices=[-1, -1], num_slots=2)
    before = clone_exact(problem.conv_state)
    done = reference(problem)
    assert not done.out.any()
    assert_same_bits(done.conv_state, before, "state")


FAULTY = [
    pytest.param([1, 1], [(0, 1, "duplicate"), (1, 1, "duplicate")], id="duplicate"),
    pytest.param([0, 4], [(1, 4, "out of range")], id="out-of-range"),
    pytest.param([0, -2], [(1, -2, "below -1")], id="below-padding"),
    pytest.param([7, 7], [(0, 7, "out of range"), (1, 7, "out of range")], id="range-goes-first"),
    pytest.param(
        [2, 0, 2, -1, 2],
        [(0, 2, "duplicate"), (2, 2, "duplicate"), (4, 2, "duplicate")],
        id="three-of-a-kind",
    ),
]


@pytest.mark.parametrize(("indices", "faults"), FAULTY)
def test_bad_slots_raise_and_write_nothing(indices, faults):
    problem = make_problem(len(indices), 8, indices=indices, num_slots=4)
    before = problem.clone()
    with pytest.raises(BadSlotError) as raised:
        reference(problem)
    assert raised.value.faults == faults
    assert_same_bits(problem.conv_state, before.conv_state, "state")
    assert_same_bits(problem.out, before.out, "out")


@pytest.mark.parametrize(("indices", "faults"), FAULTY)
def test_report_skips_bad_rows_and_records_them(indices, faults):
    code = {"below -1": 1, "out of range": 2, "duplicate": 3}
    problem = make_problem(
        len(indices), 8, indices=indices, num_slots=4, on_bad_index="report", has_bias=True
    )
    problem.status.fill_(77)
    bad = [row for row, _, _ in faults]
    clean = problem.clone()
    clean.indices[bad] = -1
    clean.with_(on_bad_index="trap", status=None)
    reference(clean.with_(status=None))
    done = reference(problem)
    assert_same_bits(done.out, clean.out, "out: bad rows are zero, good ones unaffected")
    assert_same_bits(done.conv_state, clean.conv_state, "state")
    wanted = torch.full_like(done.status, 77)
    for row, slot, kind in faults:
        wanted[row] = torch.tensor([code[kind], slot], dtype=torch.int32)
    assert_same_bits(done.status, wanted, "status: good rows are left alone")


def test_find_faults_against_a_loop():
    for _ in range(200):
        indices = torch.randint(-3, 8, (6,), dtype=torch.int32)
        slots = indices.tolist()
        expected = []
        for slot in slots:
            if slot < -1:
                expected.append(1)
            elif slot >= 5:
                expected.append(2)
            elif slot != -1 and slots.count(slot) > 1:
                expected.append(3)
            else:
                expected.append(0)
        assert find_faults(indices, 5).tolist() == expected


def test_more_rows_than_slots_and_more_slots_than_rows():
    many_rows = make_problem(5, 8, indices=[0, -1, 1, -1, -1], num_slots=2)
    assert reference(many_rows).out.isfinite().all()
    many_slots = make_problem(2, 8, num_slots=7)
    before = clone_exact(many_slots.conv_state)
    done = reference(many_slots)
    assert_same_bits(done.conv_state[2:], before[2:], "slots beyond the rows")
