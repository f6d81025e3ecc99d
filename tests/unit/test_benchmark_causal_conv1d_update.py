# SPDX-License-Identifier: Apache-2.0
"""The update's problems, reference and arms, on the CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.causal_conv1d_update import peers
from benchmarks.causal_conv1d_update.bench import IndexedCase, UpdateCase
from benchmarks.causal_conv1d_update.problem import Problem, mismatch, reference
from benchmarks.harness.arm import Arm, Role
from benchmarks.harness.case import Lab
from benchmarks.harness.checks import ONE_ROUNDING, close

LAB = Lab(rounds=1, l2_bytes=60 << 20, ceiling_gb_s=None, timer=None, check_only=True)
PROBLEMS = [
    Problem("L4", 3, 16, state_len=4),
    Problem("L3-compact", 3, 16, state_len=3),
    Problem("L3-channel-last", 3, 16, state_len=3, channel_last=True),
    Problem("W2-L1", 3, 16, state_len=1, width=2),
    Problem("fp16-L4", 3, 16, state_len=4, dtype="float16"),
    Problem("indices", 5, 16, state_len=4, indexed=True),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda one: one.name)
def test_reference_against_a_loop_over_the_definition(problem):
    buffers = problem.make_sets(1, "cpu")[0]
    before = buffers.conv_state.clone()
    output, state = reference(buffers, indexed=problem.indexed)
    assert torch.equal(buffers.conv_state, before)
    for n in range(problem.rows):
        slot = int(buffers.conv_state_indices[n]) if problem.indexed else n
        for d in range(problem.channels):
            history = [*before[slot, d].tolist(), buffers.x[n, d].item()]
            assert state[slot, d].tolist() == history[-problem.state_len :]
            taps = zip(history[-problem.width :], buffers.weight[d].tolist(), strict=True)
            acc = torch.tensor(sum(a * b for a, b in taps), dtype=torch.float64)
            expected = (acc * torch.sigmoid(acc)).item()
            assert output[n, d].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda one: one.name)
def test_footprint_is_what_a_set_holds(problem):
    first, second = problem.make_sets(2, "cpu")
    tensors = [first.x, first.out, first.conv_state, first.weight, first.conv_state_indices]
    held = sum(one.numel() * one.element_size() for one in tensors if one is not None)
    assert problem.footprint_bytes == held
    assert problem.traffic_bytes > problem.footprint_bytes
    assert first.conv_state.data_ptr() != second.conv_state.data_ptr()
    assert first.out.isnan().all()
    if problem.channel_last:
        assert first.conv_state.stride() == (3 * problem.channels, 1, problem.channels)


def test_traffic_of_the_decode_row():
    problem = Problem("L4", 1024, 8192, state_len=4)
    assert problem.traffic_bytes == 20 * 1024 * 8192 + 8 * 8192


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda one: one.name)
def test_eager_peer_is_right(problem):
    eager = peers.eager(indexed=problem.indexed, variant="trap" if problem.indexed else "")
    case = (IndexedCase if problem.indexed else UpdateCase)(problem, "cpu")
    assert case.check(eager) is None


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda buffers: buffers.conv_state[0, 0].fill_(7.0), "conv_state: "),
        (lambda buffers: buffers.out.fill_(torch.nan), "output: "),
        (lambda buffers: buffers.out.mul_(1.02), "output: "),
        (lambda buffers: None, None),
    ],
)
def test_a_wrong_state_or_output_is_named(tamper, message):
    buffers = PROBLEMS[0].make_sets(1, "cpu")[0]
    expected = reference(buffers, indexed=False)
    buffers.out.copy_(expected[0])
    buffers.conv_state.copy_(expected[1])
    tamper(buffers)
    found = mismatch(expected, buffers.out, buffers.conv_state, ONE_ROUNDING)
    assert (found or "").startswith(message or "")
    assert (found is None) is (message is None)


def test_close_takes_a_neighbour_and_refuses_two_steps():
    one = torch.tensor([1.0])
    step = torch.finfo(torch.bfloat16).eps
    assert close((one + step).bfloat16(), one, ONE_ROUNDING) is None
    assert "worst error" in close((one + 2 * step).bfloat16(), one, ONE_ROUNDING)


@pytest.mark.parametrize(
    ("problem", "gap"),
    [
        (PROBLEMS[0], None),
        (PROBLEMS[1], "L=3 for W=4"),
        (PROBLEMS[2], "L=3"),
        (PROBLEMS[5], "no slot"),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_fla_says_where_it_does_not_apply(problem, gap):
    found = peers.fla_gap(problem)
    assert (found is None) if gap is None else gap in found


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda one: one.name)
def test_check_only_lists_every_arm_and_times_none(problem):
    case = (IndexedCase if problem.indexed else UpdateCase)(problem, "cpu")
    rows = case.measure(LAB).rows
    assert {"ours", "cudnn-frontend", "fla"} <= {row.arm for row in rows}
    assert [row.note for row in rows if row.status == "failed"] == []
    assert all(row.median_us is None for row in rows)
    assert {row.engine for row in rows if row.arm == "ours"} == {"reference"}


def test_a_broken_arm_of_ours_fails_the_case(monkeypatch):
    def wrong(sample, **_):
        return Arm("ours", Role.OURS, "portable", lambda buffers: buffers.out.zero_, "")

    monkeypatch.setattr("benchmarks.causal_conv1d_update.ours.plan_arm", wrong)
    outcome = UpdateCase(PROBLEMS[0], "cpu").measure(LAB)
    assert outcome.ours_failed
    assert outcome.rows[0].status == "failed"
