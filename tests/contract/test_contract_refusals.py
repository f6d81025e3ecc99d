# SPDX-License-Identifier: Apache-2.0
"""Bad operands are refused with a typed error, and nothing is written."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import ContractError, GradModeError, LifecycleError
from cudnn_blocks.operands import byte_span
from tests.contract.op_cases import OP_CASES
from tests.helpers.tensors import assert_same_bits

cases = pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)


def declared(op):
    return {name: tensor for name, tensor in op.operands.items() if tensor is not None}


def assert_refused(op, error, match, **changes):
    before = op.clone()
    with pytest.raises(error, match=match):
        op.plan.execute(**{**op.operands, **op.workspace(), **changes})
    for name, tensor in declared(op).items():
        assert_same_bits(tensor, before[name], name)


def off_by_one_element(tensor):
    base = torch.zeros(
        tensor.untyped_storage().nbytes() // tensor.element_size() + 1,
        dtype=tensor.dtype,
        device=tensor.device,
    )
    return base.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


@cases
def test_misaligned(case, device):
    op = case.build(device).compiled()
    for operand in op.plan._operands.operands:
        tensor = op.operands[operand.name]
        if tensor is not None and tensor.element_size() < operand.alignment_bytes:
            match = f"^{operand.name}: expected a {operand.alignment_bytes}-byte aligned address"
            assert_refused(op, ContractError, match, **{operand.name: off_by_one_element(tensor)})


@cases
def test_overlapping(case, device):
    op = case.build(device).compiled()
    for written in op.mutated & set(declared(op)):
        target = op.operands[written]
        low, high = byte_span(target)
        for name, tensor in declared(op).items():
            size = byte_span(tensor)
            if name == written or size[1] - size[0] > high - low:
                continue
            inside = torch.empty(0, dtype=tensor.dtype, device=device).set_(
                target.untyped_storage(), 0, tensor.shape, tensor.stride()
            )
            assert_refused(op, ContractError, "overlapping byte ranges", **{name: inside})


@cases
def test_too_small(case, device):
    """One element short along the first axis of every operand."""
    op = case.build(device).compiled()
    first = next(iter(op.operands))
    for name, tensor in declared(op).items():
        rows = op.operands[first].shape[0]
        if name == first or (name == "conv_state" and tensor.shape[0] > rows):
            continue  # a smaller leading operand makes all others too large; spare slots may go
        assert_refused(op, ContractError, "expected", **{name: tensor[:-1]})


@cases
def test_larger_than_the_sample(case, device):
    op = case.build(device).compiled()
    larger = {
        name: None if t is None else torch.cat([t, t[-1:]]).contiguous()
        for name, t in op.operands.items()
    }
    assert_refused(op, ContractError, "expected", **larger)


@cases
def test_another_dtype(case, device):
    op = case.build(device).compiled()
    for name, tensor in declared(op).items():
        assert_refused(op, ContractError, f"^{name}: expected dtype", **{name: tensor.double()})


@cases
def test_another_device(case, device):
    op = case.build(device).compiled()
    for name, tensor in declared(op).items():
        elsewhere = tensor.to("meta")
        assert_refused(op, ContractError, f"^{name}: expected a tensor on", **{name: elsewhere})


@cases
def test_not_a_tensor(case, device):
    op = case.build(device).compiled()
    for name in declared(op):
        assert_refused(op, TypeError, f"^{name}: expected", **{name: "a tensor"})


@cases
def test_missing(case, device):
    op = case.build(device).compiled()
    for name in declared(op):
        assert_refused(op, (ContractError, TypeError), f"^{name}: expected", **{name: None})


@cases
def test_grad_mode(case, device):
    op = case.build(device).compiled()
    for name, tensor in declared(op).items():
        if tensor.is_floating_point():
            leaf = tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            if leaf.stride() == tensor.stride():
                assert_refused(op, GradModeError, f"^{name}: requires grad", **{name: leaf})


@cases
def test_execute_before_compile(case, device):
    assert_refused(case.build(device), LifecycleError, r"call compile\(\)")


@cases
def test_the_workspace(case, device):
    op = case.build(device).compiled()
    size_bytes = op.plan.get_workspace_size()
    if size_bytes == 0:
        assert op.plan._layout.regions == ()
        return
    good = op.workspace()["workspace"]
    longer = torch.zeros(size_bytes + 16, dtype=torch.uint8, device=device)
    for bad in (good[:-1], longer[16:], None, good.view(torch.int8)):
        assert_refused(op, ContractError, "^workspace: expected", workspace=bad)
