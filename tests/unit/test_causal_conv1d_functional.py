# SPDX-License-Identifier: Apache-2.0
"""``ops.causal_conv1d_update`` in eager mode: field cases S01, S02, S06, S07, S22, S29."""

from __future__ import annotations

import math

import pytest
import torch

from cudnn_blocks import ContractError, NotServedError, ops
from cudnn_blocks.plan_cache import PLANS
from tests.helpers.conv1d_problem import assert_matches, expect, make_problem
from tests.helpers.tensors import assert_same_bits, clone_exact, poison_allocator

BF16 = torch.bfloat16


def update(problem, **changes):
    """Runs the functional form in place of a plan; returns the problem with its output."""
    given = {"x": problem.x, "conv_state": problem.conv_state, "weight": problem.weight} | changes
    out = ops.causal_conv1d_update(
        given["x"],
        given["conv_state"],
        given["weight"],
        given.get("bias", problem.bias),
        given.get("activation", problem.activation),
        conv_state_indices=given.get("conv_state_indices", problem.indices),
    )
    return problem.with_(out=out)


def check(problem):
    expected = expect(problem)
    done = update(problem)
    assert_matches(done, expected)
    return done


@pytest.mark.parametrize("state", [[1000.0, 1, 2, 3], [1.0, 2, 3]])
def test_the_newest_tokens_meet_the_filter(device, state):
    problem = make_problem(1, 1, 4, len(state), device=device)
    problem.x.fill_(4)
    problem.conv_state.copy_(torch.tensor(state))
    problem.weight.copy_(torch.tensor([1.0, 2, 4, 8]))
    done = update(problem)
    assert done.out.item() == 49.0
    assert done.conv_state.flatten().tolist() == [*state[1:], 4.0]


def test_width_five_declines_and_writes_nothing(device):
    problem = make_problem(1, 8, 5, 5, device=device)
    before = clone_exact(problem.conv_state)
    with pytest.raises(NotServedError, match=r"width=5 \(served: 2, 3, 4\)"):
        update(problem)
    assert_same_bits(problem.conv_state, before, "state")


def test_cache_seqlens_declines(device):
    problem = make_problem(1, 8, device=device)
    before = clone_exact(problem.conv_state)
    with pytest.raises(NotServedError, match="cache_seqlens is not served"):
        ops.causal_conv1d_update(
            problem.x,
            problem.conv_state,
            problem.weight,
            cache_seqlens=torch.zeros(1, dtype=torch.int32, device=device),
        )
    assert_same_bits(problem.conv_state, before, "state")


def test_padding_rows_on_poisoned_memory(device):
    problem = make_problem(2, 8, indices=[0, -1], num_slots=3, device=device)
    problem.x[1] = math.nan
    before = clone_exact(problem.conv_state)
    alone = update(problem.clone().with_(x=problem.x[:1], indices=problem.indices[:1]))
    poison_allocator((2, 8), BF16, device)
    done = update(problem)
    assert_same_bits(done.out[1], torch.zeros(8, dtype=BF16), "padding")
    assert_same_bits(done.out[:1], alone.out, "row 0 as if it were alone")
    assert_same_bits(done.conv_state[1:], before[1:], "slots 1 and 2")


def test_all_padding_on_poisoned_memory(device):
    problem = make_problem(2, 8, indices=[-1, -1], num_slots=3, device=device)
    problem.x.fill_(math.nan)
    before = clone_exact(problem.conv_state)
    poison_allocator((2, 8), BF16, device)
    done = update(problem)
    assert_same_bits(done.out, torch.zeros(2, 8, dtype=BF16), "out")
    assert_same_bits(done.conv_state, before, "state")


@pytest.mark.parametrize("name", ["x", "conv_state", "weight", "bias"])
def test_off_a_16_byte_boundary(device, name):
    problem = make_problem(2, 8, device=device, has_bias=True)
    operand = problem.operands[name]
    base = torch.zeros(operand.numel() + 1, dtype=BF16, device=device)
    with pytest.raises(ContractError, match=f"^{name}: expected a 16-byte aligned address, got"):
        update(problem, **{name: base[1:].view(operand.shape)})
    check(problem)  # and the device is still usable


def test_row_pitches(device):
    check(make_problem(3, 8, pitch=16, device=device))
    check(make_problem(3, 5, device=device))
    check(make_problem(3, 5, pitch=8, device=device))
    with pytest.raises(ContractError, match=r"^x: expected strides \(8, 1\) or \(ld, 1\)"):
        update(make_problem(3, 8, pitch=12, device=device))


def test_a_channel_last_state_is_changed_where_it_lies(device):
    problem = make_problem(2, 8, 4, 3, "channel_last", device=device)
    storage = problem.conv_state.transpose(1, 2)
    assert storage.is_contiguous()
    expected = torch.cat([storage[:, 1:], problem.x.unsqueeze(1)], dim=1)
    check(problem)
    assert_same_bits(storage, expected, "the caller's storage")


@pytest.mark.parametrize("break_", ["channel-last-l4", "every-second-slot"])
def test_strided_states_are_refused_untouched(device, break_):
    problem = make_problem(2, 8, device=device)
    pool = torch.randn(4, 8, 4, device=device).to(BF16)
    if break_ == "channel-last-l4":
        state = pool.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        state = pool[::2]
    before = clone_exact(state)
    with pytest.raises(ContractError, match=r"^conv_state: expected strides \(32, 4, 1\), got"):
        update(problem, conv_state=state)
    assert_same_bits(state, before, "state")


def test_indices_from_a_column_of_a_block_table(device):
    table = torch.full((4, 5), -7, dtype=torch.int32, device=device)
    table[:, 0] = torch.tensor([3, 0, 2, 1])
    many = make_problem(4, 8, device=device, num_slots=4)
    with pytest.raises(ContractError, match=r"^conv_state_indices: expected contiguous strides"):
        update(many, conv_state_indices=table[:, 0])
    one = make_problem(1, 8, device=device, num_slots=4)
    check(one.with_(indices=table[:1, 0]))


def test_int64_indices_are_refused(device):
    problem = make_problem(2, 8, device=device)
    with pytest.raises(ContractError, match=r"^conv_state_indices: expected dtype torch\.int32"):
        update(problem, conv_state_indices=torch.tensor([0, 1], device=device))


@pytest.mark.parametrize("with_indices", [False, True])
def test_an_empty_batch(device, with_indices):
    problem = make_problem(0, 8, device=device, num_slots=4, indices=[] if with_indices else None)
    before = clone_exact(problem.conv_state)
    out = update(problem).out
    assert (out.shape, out.dtype, out.device.type) == ((0, 8), BF16, device.type)
    assert_same_bits(problem.conv_state, before, "state")
    check(make_problem(2, 8, device=device))


def test_no_slots_at_all(device):
    padding = make_problem(2, 8, device=device, indices=[-1, -1], num_slots=0)
    assert_same_bits(update(padding).out, torch.zeros(2, 8, dtype=BF16), "out")


def test_the_output_is_new_and_contiguous(device):
    problem = make_problem(2, 8, pitch=16, device=device)
    first, second = update(problem).out, update(problem).out
    assert first.data_ptr() != second.data_ptr()
    assert first.stride() == second.stride() == (8, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("x", None), ("x", [1.0]), ("conv_state", None), ("weight", 3), ("bias", [1.0])],
)
def test_arguments_of_a_wrong_type(device, name, value):
    problem = make_problem(2, 8, device=device, has_bias=True)
    before = clone_exact(problem.conv_state)
    with pytest.raises(TypeError, match=f"^(sample_)?{name}: expected "):
        update(problem, **{name: value})
    assert_same_bits(problem.conv_state, before, "state")


KEY_CASES = {
    "plain": {},
    "identity": {"activation": "identity"},
    "silu": {"activation": "silu"},
    "swish": {"activation": "swish"},
    "bias": {"has_bias": True},
    "indices": {"indices": [2, 0, -1, 1]},
    "bias+indices+silu": {"has_bias": True, "indices": [2, 0, -1, 1], "activation": "silu"},
    "l3": {"state_len": 3},
    "l3-channel-last": {"state_len": 3, "layout": "channel_last"},
    "w3": {"width": 3, "state_len": 3},
    "pitch": {"pitch": 16},
    "one-row": {"num_rows": 1},
    "fp16": {"dtype": torch.float16},
}
"""S22: what a cache key might forget. N, S and the pitch are no part of it."""


def key_case(name, device):
    changes = dict(KEY_CASES[name])
    if changes.get("indices"):
        changes["num_slots"] = 5
    torch.manual_seed(7)
    return make_problem(changes.pop("num_rows", 4), 8, device=device, **changes)


@pytest.mark.parametrize("order", [1, -1], ids=["forward", "backward"])
def test_no_call_gets_another_calls_kernel(device, order):
    alone = {}
    for name in KEY_CASES:
        PLANS.clear()
        alone[name] = check(key_case(name, device))
    PLANS.clear()
    for name in [*KEY_CASES, *KEY_CASES][::order]:
        done = update(key_case(name, device))
        assert_same_bits(done.out, alone[name].out, f"{name}: out")
        assert_same_bits(done.conv_state, alone[name].conv_state, f"{name}: state")


def test_every_pair_in_both_orders(device):
    """The second of two calls, on a fresh cache, is what it is alone."""
    alone = {}
    for name in KEY_CASES:
        alone[name] = update(key_case(name, device)).out
    for first in KEY_CASES:
        for second in KEY_CASES:
            PLANS.clear()
            update(key_case(first, device))
            assert_same_bits(update(key_case(second, device)).out, alone[second], second)


def test_no_result_changes_after_eviction(device):
    PLANS.set_limit(2)
    try:
        alone = {name: update(key_case(name, device)).out for name in KEY_CASES}
        for name in KEY_CASES:
            assert_same_bits(update(key_case(name, device)).out, alone[name], name)
        assert PLANS.stats().size == 2
        assert PLANS.stats().evictions > len(KEY_CASES)
    finally:
        PLANS.set_limit(128)


def test_batch_sizes_slots_and_pitches_share_one_plan(device):
    for rows in (1, 2, 3, 8, 257):
        check(make_problem(rows, 8, device=device))
        check(make_problem(rows, 8, device=device, num_slots=rows + 9, pitch=24))
    assert (PLANS.stats().size, PLANS.stats().misses) == (1, 1)


def test_consecutive_steps_keep_the_last_tokens(device):
    problem = make_problem(2, 8, device=device)
    tokens = torch.randn(7, 2, 8, device=device).to(BF16)
    for token in tokens:
        check(problem.with_(x=token))
    assert_same_bits(problem.conv_state, tokens[-4:].permute(1, 2, 0), "state")
