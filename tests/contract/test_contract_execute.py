# SPDX-License-Identifier: Apache-2.0
"""What ``execute`` may touch: outputs and declared mutations alone, and always the same bits."""

from __future__ import annotations

import pytest
import torch

from tests.contract.op_cases import OP_CASES, clone_operands
from tests.helpers.tensors import assert_same_bits, guarded_copy

cases = pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)


def assert_same(actual, expected, names=None):
    for name, tensor in actual.items():
        if tensor is not None and (names is None or name in names):
            assert_same_bits(tensor, expected[name], name)


@cases
def test_right_and_only_the_declared_operands_change(case, device):
    op = case.build(device).compiled()
    before = op.clone()
    after = op.run(op.operands, **op.workspace())
    op.check(before, after)
    assert_same(after, before, set(after) - op.mutated)
    changed = [
        name
        for name in op.mutated
        if after[name] is not None and not torch.equal(after[name], before[name])
    ]
    assert changed, "the case shows nothing: no operand changed"


@cases
def test_the_same_bits_every_time(case, device):
    op = case.build(device).compiled()
    start = op.clone()
    runs = [op.run(clone_operands(start), **op.workspace()) for _ in range(3)]
    for again in runs[1:]:
        assert_same(again, runs[0])


@cases
def test_the_workspace_may_hold_anything(case, device):
    op = case.build(device).compiled()
    start = op.clone()
    poisoned = op.run(clone_operands(start), **op.workspace())
    zeros = {name: torch.zeros_like(buffer) for name, buffer in op.workspace().items()}
    assert_same(op.run(clone_operands(start), **zeros), poisoned)


@pytest.mark.parametrize(
    "case", [case for case in OP_CASES if not case.is_in_place], ids=lambda case: case.name
)
def test_poisoned_outputs_are_overwritten(case, device):
    """Other garbage in the result gives the same bits: every element is written."""
    op = case.build(device).compiled()
    first, second = op.clone(), op.clone()
    first[op.result].fill_(float("nan"))
    second[op.result].fill_(-7)
    assert_same(op.run(second, **op.workspace()), op.run(first, **op.workspace()))


@cases
def test_guards_around_every_operand_and_the_workspace_survive(case, device):
    op = case.build(device).compiled()
    start = op.clone()
    expected = op.run(clone_operands(start), **op.workspace())
    everything = {**start, **op.workspace()}
    pairs = {n: guarded_copy(t) for n, t in everything.items() if t is not None}
    guarded = {n: pairs[n][0] if n in pairs else None for n in everything}
    op.plan.execute(**guarded)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for name, (_, buffer) in pairs.items():
        assert buffer.is_intact(), f"written outside {name}"
    assert_same({n: t for n, t in guarded.items() if n in expected}, expected)


@cases
def test_gaps_of_padded_operands_are_not_written(case, device):
    op = case.build(device).compiled()
    gaps = {}
    for name, tensor in op.operands.items():
        if tensor is not None and tensor.dim() == 2 and tensor.stride(0) > tensor.shape[1]:
            rows, columns, pitch = tensor.shape[0] - 1, tensor.shape[1], tensor.stride(0)
            gap = tensor.as_strided((rows, pitch), (pitch, 1))[:, columns:]
            gaps[name] = (gap, gap.clone())
    op.run(op.operands, **op.workspace())
    for name, (now, then) in gaps.items():
        assert_same_bits(now, then, f"gaps of {name}")


@pytest.mark.parametrize(
    "case", [case for case in OP_CASES if case.functional], ids=lambda case: case.name
)
def test_the_functional_form_agrees(case, device):
    op = case.build(device).compiled()
    planned, functional = op.clone(), op.clone()
    op.run(planned, **op.workspace())
    out = case.functional(functional)
    assert_same_bits(out, planned[op.result], op.result)
    assert_same(functional, planned, op.mutated - op.returned)


@cases
def test_workspace_size_is_exact_before_and_after_compile(case, device):
    op = case.build(device)
    before = op.plan.get_workspace_size()
    op.compiled()
    assert op.plan.get_workspace_size() == before
    assert before % 256 == 0


@cases
def test_describe_and_probe_name_the_engine(case, device):
    op = case.build(device)
    report = op.plan.probe()
    assert report.served
    for stage in report.stages:
        assert stage.engine in op.plan.describe()
        assert (stage.engine == "reference") == (device.type == "cpu")
