# SPDX-License-Identifier: Apache-2.0
"""Batches, slots and offsets past every 16- and 32-bit limit (S04, S05)."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import ContractError
from tests.helpers.conv1d_problem import STATE_FORMS, assert_matches, expect, make_problem
from tests.helpers.tensors import assert_same_bits, clone_exact

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_rows", [65535, 65536, 131073])
@pytest.mark.parametrize(("width", "state_len", "layout"), STATE_FORMS)
def test_large_batches(num_rows, width, state_len, layout):
    problem = make_problem(num_rows, 8, width, state_len, layout, device="cuda", activation="silu")
    expected = expect(problem)
    assert_matches(problem.run(), expected)


@pytest.mark.parametrize("on_bad_index", ["trap", "report"])
@pytest.mark.parametrize("num_rows", [1024, 65536])
def test_large_routed_batches(num_rows, on_bad_index):
    problem = make_problem(
        num_rows, 8, device="cuda", indices="shuffled", on_bad_index=on_bad_index
    )
    problem.indices[::7] = -1
    expected = expect(problem)
    assert_matches(problem.run(), expected)


def test_one_plan_for_every_batch_up_to_its_sample():
    plan = make_problem(300, 520, device="cuda", has_bias=True).compiled()
    for num_rows in (0, 1, 2, 3, 4, 5, 7, 64, 127, 299, 300):
        problem = make_problem(
            num_rows, 520, device="cuda", has_bias=True, num_slots=max(num_rows, 1)
        )
        expected = expect(problem)
        problem.execute(plan)
        assert_matches(problem, expected, f"N={num_rows}")
    larger = make_problem(301, 520, device="cuda", has_bias=True)
    with pytest.raises(ContractError, match="at most 300"):
        larger.execute(plan)


def test_slots_without_a_row_are_left_alone():
    problem = make_problem(3, 520, device="cuda", num_slots=9)
    expected, before = expect(problem), clone_exact(problem.conv_state)
    done = problem.run()
    assert_matches(done, expected)
    assert_same_bits(done.conv_state[3:], before[3:], "slots beyond N")


def test_more_rows_than_slots():
    problem = make_problem(9, 520, device="cuda", indices=[1, -1, -1, 0] + [-1] * 5, num_slots=2)
    expected = expect(problem)
    assert_matches(problem.run(), expected)


@pytest.mark.parametrize("pitch", [528, 1024, 65536])
def test_padded_rows(pitch):
    problem = make_problem(33, 520, device="cuda", pitch=pitch, has_bias=True, activation="silu")
    expected = expect(problem)
    assert_matches(problem.run(), expected)


NUM_SLOTS, CHANNELS = 262145, 2048
MARK = 1.0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("state_len", "layout"), [(4, "compact"), (3, "compact"), (3, "channel_last")]
)
@pytest.mark.parametrize("on_bad_index", ["trap", "report"])
def test_a_slot_beyond_two_to_the_31_elements(state_len, layout, on_bad_index):
    """S04: the last slot starts at 2**31 elements for L = 4; a 32-bit offset would hit slot 0."""
    num_slots = NUM_SLOTS if state_len == 4 else 2**31 // (3 * CHANNELS) + 2
    shape = (num_slots, CHANNELS, state_len)
    if layout == "channel_last":
        state = torch.empty(num_slots, state_len, CHANNELS, dtype=torch.bfloat16, device="cuda")
        state = state.transpose(1, 2)
    else:
        state = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    state.fill_(MARK)
    assert (num_slots - 1) * CHANNELS * state_len >= 2**31 - CHANNELS * state_len * 2
    small = make_problem(
        1, CHANNELS, 4, state_len, layout, device="cuda", indices=[0], on_bad_index=on_bad_index
    ).with_(activation="silu")
    small = small.with_(conv_state=small.conv_state[:1])
    expected = expect(small)
    state[-1].copy_(small.conv_state[0])
    status = small.status
    big = small.with_(
        conv_state=state,
        out=torch.full_like(small.out, float("nan")),
        indices=torch.tensor([num_slots - 1], dtype=torch.int32, device="cuda"),
        status=status,
    )
    big.run()
    small.run()
    assert_same_bits(big.out, small.out, "the output of a one-slot copy")
    assert_same_bits(state[-1], small.conv_state[0], "the last slot")
    assert_matches(small, expected)
    assert bool((state[:-1] == MARK).all()), "another slot was written"


@pytest.mark.timeout(300)
def test_rows_beyond_two_to_the_31_elements_of_state():
    """Without indices row n is slot n, so N * D * L passes 2**31 as well."""
    num_rows, channels = 2**19 + 2, 1024
    x = torch.randn(num_rows, channels, dtype=torch.bfloat16, device="cuda")
    state = torch.ones(num_rows, channels, 4, dtype=torch.bfloat16, device="cuda")
    small = make_problem(2, channels, device="cuda")
    small.conv_state.fill_(1)
    small.x.copy_(x[-2:])
    big = small.with_(x=x, conv_state=state, out=torch.empty_like(x))
    big.run()
    small.run()
    assert_same_bits(big.out[-2:], small.out, "the last rows")
    assert_same_bits(state[-2:], small.conv_state, "the last slots")
    assert_same_bits(state[:, :, 3], x, "every row's newest token")
