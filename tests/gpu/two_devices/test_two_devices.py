# SPDX-License-Identifier: Apache-2.0
"""S25: tensors on a device that is not the current one."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import ContractError
from cudnn_blocks.plan_cache import PLANS
from tests.contract.op_cases import OP_CASES, clone_operands
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]
cases = pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)
functional_cases = pytest.mark.parametrize(
    "case", [case for case in OP_CASES if case.functional], ids=lambda case: case.name
)
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _first_is_current():
    torch.cuda.set_device(0)
    yield
    assert torch.cuda.current_device() == 0, "the current device was changed"


@cases
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "after-cuda:0"])
def test_right_on_the_second_device(case, is_warm):
    if is_warm:
        first = case.build(FIRST).compiled()
        first.run(first.operands, **first.workspace())
    op = case.build(SECOND).compiled()
    before = op.clone()
    op.check(before, op.run(op.operands, **op.workspace()))
    assert torch.cuda.current_device() == 0


@functional_cases
@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "after-cuda:0"])
def test_the_functional_form_on_the_second_device(case, is_warm):
    PLANS.clear()
    torch.manual_seed(0)
    first = case.build(FIRST)
    torch.manual_seed(0)
    second = case.build(SECOND)
    expected = case.functional(first.operands) if is_warm else None
    out = case.functional(second.operands)
    assert out.device == SECOND
    if expected is None:
        expected = case.functional(first.operands)
    assert_same_bits(out.cpu(), expected.cpu(), "out")
    assert PLANS.stats().misses == 2, "a plan of one device served another"


@cases
def test_ambient_and_explicit_streams_of_the_second_device(case):
    op = case.build(SECOND).compiled()
    extra, start = op.workspace(), op.clone()
    expected = op.run(clone_operands(start), **extra)
    torch.cuda.synchronize(SECOND)
    side = torch.cuda.Stream(SECOND)
    for current_stream in (side, side.cuda_stream):
        used = clone_operands(start)
        torch.cuda.synchronize(SECOND)
        op.run(used, current_stream=current_stream, **extra)
        side.synchronize()
        for name, tensor in used.items():
            if tensor is not None:
                assert_same_bits(tensor, expected[name], name)


@cases
def test_a_stream_of_the_wrong_device(case):
    op = case.build(SECOND).compiled()
    with pytest.raises(ContractError, match="^current_stream: expected a stream of cuda:1"):
        op.run(op.operands, current_stream=torch.cuda.Stream(FIRST), **op.workspace())


@cases
def test_mixed_devices(case):
    op = case.build(SECOND).compiled()
    for name, tensor in op.operands.items():
        if tensor is not None:
            moved = {**op.operands, name: tensor.to(FIRST)}
            with pytest.raises(ContractError, match=f"^{name}: expected a tensor on cuda:1"):
                op.run(moved, **op.workspace())


@cases
def test_a_plan_of_the_first_device_refuses_the_second(case):
    first, second = case.build(FIRST).compiled(), case.build(SECOND)
    with pytest.raises(ContractError, match="expected a tensor on cuda:0"):
        first.plan.execute(**second.operands, **second.workspace())


@cases
def test_capture_on_the_second_device(case):
    op = case.build(SECOND).compiled()
    extra, start = op.workspace(), op.clone()
    expected = op.run(clone_operands(start), **extra)
    captured = clone_operands(start)
    with torch.cuda.device(SECOND):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            op.run(captured, **extra)
        graph.replay()
        torch.cuda.synchronize()
    for name, tensor in captured.items():
        if tensor is not None:
            assert_same_bits(tensor, expected[name], name)
