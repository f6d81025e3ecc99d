# SPDX-License-Identifier: Apache-2.0
"""The check of a call that was seen before accepts nothing that the full one refuses."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks.ops import seen_calls
from tests.helpers.pointwise_problem import make_gate, make_qk
from tests.helpers.tensors import clone_exact

BF16 = torch.bfloat16


def seeing_plan(problem):
    """A compiled plan that takes CPU tensors for those of its device."""
    plan = problem.plan()
    plan.compile()
    plan._device_index = -1
    return plan


def is_plainly_good(plan, operands):
    try:
        return plan._is_plainly_good(list(operands.values()))
    except (ValueError, TypeError, AttributeError):  # a launch takes any exception for a no
        return False


PROBLEMS = {
    "slab": lambda: make_qk((2, 5, 4, 2, 64), 16),
    "compact": lambda: make_qk((2, 5, 4, 2, 64), 16, in_slab=False, is_expanded=True),
    "no-norm": lambda: make_qk((2, 5, 4, 2, 64), 6, has_norm=False),
    "one-token": lambda: make_qk((1, 1, 4, 2, 64), 16),
    "one-batch": lambda: make_qk((1, 5, 1, 1, 64), 0),
    "gate": lambda: make_gate((2, 5, 4, 64)),
    "gate-in-place": lambda: make_gate((1, 5, 4, 64), in_place=True),
}
problems = pytest.mark.parametrize("problem", list(PROBLEMS.values()), ids=PROBLEMS)


@problems
def test_a_good_call_is_known_the_second_time(problem, monkeypatch):
    problem = problem()
    plan = seeing_plan(problem)
    assert is_plainly_good(plan, problem.operands)
    monkeypatch.setattr(type(plan._operands), "check_call", None)
    for _ in range(2):
        assert is_plainly_good(plan, problem.operands)


@problems
def test_every_fault_is_seen_after_a_good_call(problem):
    problem = problem()
    plan = seeing_plan(problem)
    for name, tensor in problem.operands.items():
        if tensor is None:
            assert not is_plainly_good(
                plan, {**problem.operands, name: torch.zeros(64, dtype=BF16)}
            )
            continue
        assert is_plainly_good(plan, problem.operands)
        moved = torch.zeros(tensor.untyped_storage().nbytes() // 2 + 1, dtype=BF16)
        faults = [
            None,
            tensor.float(),
            tensor.half(),
            tensor.to("meta"),
            tensor[..., :-1],
            tensor[0],
            moved.as_strided(tensor.shape, tensor.stride(), 1),
            torch.cat([tensor, tensor[:1]]),
        ]
        for fault in faults:
            assert not is_plainly_good(plan, {**problem.operands, name: fault}), name
        assert is_plainly_good(plan, problem.operands)


def test_an_overlap_is_seen_after_a_good_call():
    problem = make_qk((2, 5, 4, 2, 64), 16)
    plan = seeing_plan(problem)
    assert is_plainly_good(plan, problem.operands)
    slab = problem["q"]._base
    k = slab[..., 192:320].unflatten(-1, (2, 64))
    assert not is_plainly_good(plan, {**problem.operands, "k": k})
    gate = make_gate((2, 5, 4, 64))
    plan = seeing_plan(gate)
    assert is_plainly_good(plan, {**gate.operands, "out": gate["o"]})
    assert not is_plainly_good(plan, {**gate.operands, "out": gate["gate"]})


def test_what_is_legal_but_not_plain_is_left_to_the_full_check():
    problem = make_qk((2, 5, 4, 2, 64), 16, in_slab=False)
    plan = seeing_plan(problem)
    for shape in ((0, 5, 4, 2, 64), (2, 0, 4, 2, 64)):
        assert not is_plainly_good(plan, make_qk(shape, 16, in_slab=False).operands)
    odd = problem["q"][:1].as_strided((1, 5, 4, 64), (7, 256, 64, 1))
    one = {n: t[:1] if t.dim() > 1 else t for n, t in problem.operands.items()}
    assert is_plainly_good(plan, one)
    assert not is_plainly_good(plan, {**one, "q": odd})
    plan._device_index = None
    problem.with_(**{**one, "q": odd}).run(plan)


def test_another_device_is_left_to_the_full_check():
    problem = make_qk()
    plan = seeing_plan(problem)
    plan._device_index = 0
    assert not is_plainly_good(plan, problem.operands)


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(seen_calls, "_MAX_SEEN", 3)
    problem = make_qk((2, 5, 4, 2, 64), 16, in_slab=False)
    plan = seeing_plan(problem)
    kept = []
    for _ in range(8):
        kept.append({n: None if t is None else clone_exact(t) for n, t in problem.operands.items()})
        assert is_plainly_good(plan, kept[-1])
        assert len(plan._seen) <= 3
