# SPDX-License-Identifier: Apache-2.0
"""The quick check before the one host call: what it lets through, the full check lets through."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from cudnn_blocks.blocks.gated_attention_launch import MAX_SEEN, PlainCheck, are_apart
from tests.helpers.gated_attention_bad_calls import (
    EVERY_BAD_CALL,
    GEOMETRY,
    QUICKLY_SEEN,
    SEEN_BY_THE_LAUNCHER,
    make,
    make_full,
)

NAMES = ("h", "w_qkvg", "w_q_norm", "w_k_norm", "cos", "sin", "w_o", "out", "seq_lens", "lse")
ON_CPU = torch.empty(0).get_device()


def operands_of(problem):
    return tuple(problem.operands[name] for name in NAMES)


def check_of(plan, device_index=ON_CPU) -> PlainCheck:
    size_bytes = plan.get_workspace_size()
    return PlainCheck(GEOMETRY, plan._presence, plan._limits, size_bytes, device_index)


def passes(plan, problem, workspace=None, check=None) -> bool:
    workspace = problem.workspace(plan) if workspace is None else workspace
    return (check or check_of(plan)).passes(operands_of(problem), workspace)


def is_legal(plan, problem, workspace) -> bool:
    """By the full check."""
    operands, device = operands_of(problem), torch.device("cpu")
    try:
        extents = plan._operands.check_call(operands, plan._limits, device)
        plan._check_extents(extents)
        plan._layout.check(workspace, device)
        plan._operands.check_workspace(workspace, operands)
    except (ValueError, TypeError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("options", [{}, {"has_lse": True, "seq_lens": [8, 3]}])
@pytest.mark.parametrize(("batch", "tokens"), [(2, 8), (1, 8), (2, 1), (1, 1), (1, 3)])
def test_usual_calls_pass(options, batch, tokens):
    plan = make(table_rows=20, **options).compiled()
    options = {**options, "seq_lens": [1] * batch} if "seq_lens" in options else options
    call = make(batch, tokens, table_rows=20, **options)
    workspace = make().workspace(plan)
    assert passes(plan, call, workspace)
    assert is_legal(plan, call, workspace)


def test_rows_at_a_pitch_and_shared_tables_pass():
    problem = make()
    plan = problem.compiled()
    wide_h, wide_out = torch.zeros(2, 8, 136).bfloat16(), torch.zeros(2, 8, 80).bfloat16()
    cos = problem["cos"][:1].expand(2, -1, -1)
    pitched = problem.with_(h=wide_h[..., 8:72], out=wide_out[..., :64], cos=cos, sin=cos)
    assert passes(plan, pitched)
    same = problem.with_(w_k_norm=problem["w_q_norm"])
    assert passes(plan, same), "operands that are only read may share memory"


@pytest.mark.parametrize(("batch", "tokens"), [(0, 8), (2, 0)])
def test_empty_calls_are_left_to_the_full_check(batch, tokens):
    plan, empty = make_full().compiled(), make_full(batch=batch, tokens=tokens)
    workspace = make_full().workspace(plan)
    assert not passes(plan, empty, workspace)
    assert is_legal(plan, empty, workspace)


@pytest.mark.parametrize("name", list(EVERY_BAD_CALL))
def test_bad_calls(name):
    """Refused by the full check, and by the quick one unless the launcher refuses them."""
    good = make_full()
    plan, workspace = good.compiled(), good.workspace(good.plan())
    check = check_of(plan)
    bad = EVERY_BAD_CALL[name](good)
    assert passes(plan, good, workspace, check), "and is remembered"
    assert not is_legal(plan, bad, workspace)
    if name in QUICKLY_SEEN:
        assert not passes(plan, bad, workspace, check)
        assert not passes(plan, bad, workspace)


def test_each_bad_call_is_seen_by_one_of_the_two():
    assert not set(QUICKLY_SEEN) & set(SEEN_BY_THE_LAUNCHER)


def test_workspaces_that_do_not_pass():
    problem = make()
    plan = problem.compiled()
    workspace = problem.workspace(plan)
    assert passes(plan, problem, workspace)
    assert not passes(plan, problem, workspace[:-1])
    assert not passes(plan, problem, workspace.repeat(2)[::2])
    rows = 2 * 8 * 64 * 2
    for name in ("h", "out"):
        for place in (workspace[:rows], workspace[-rows:]):
            over = problem.with_(**{name: place.view(torch.bfloat16).view(2, 8, 64)})
            assert not passes(plan, over, workspace), name


def test_another_device_does_not_pass():
    problem = make()
    plan = problem.compiled()
    assert not passes(plan, problem, check=check_of(plan, device_index=0))


def test_only_numbers_are_remembered_and_not_for_ever():
    problem = make()
    plan = problem.compiled()
    workspace, check = problem.workspace(plan), check_of(plan)
    refs = [weakref.ref(tensor) for tensor in operands_of(problem) if tensor is not None]
    for tokens in range(1, 9):
        for _ in range(60):
            call = problem.with_(
                h=problem["h"][:1, :tokens].clone(), out=problem["out"][:1, :tokens].clone()
            )
            shorter = call.with_(cos=problem["cos"][:1], sin=problem["sin"][:1])
            assert passes(plan, shorter, workspace, check)
            assert len(check._seen) <= MAX_SEEN
    del problem, call, shorter
    gc.collect()
    assert not any(ref() is not None for ref in refs)


@pytest.mark.parametrize(
    ("written", "read", "expected"),
    [
        ([(0, 4)], [(4, 8)], True),
        ([(0, 5)], [(4, 8)], False),
        ([(4, 8)], [(0, 4), (8, 9)], True),
        ([(0, 4), (4, 8)], [], True),
        ([(0, 4), (3, 8)], [], False),
        ([(2, 3)], [(0, 9)], False),
        ([(0, 9)], [(2, 3)], False),
    ],
)
def test_byte_ranges(written, read, expected):
    assert are_apart(written, read) is expected
