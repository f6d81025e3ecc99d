# SPDX-License-Identifier: Apache-2.0
"""Serving on a GPU: no allocation, no sync, capturable; a capture refuses cold plans."""

from __future__ import annotations

import gc

import pytest
import torch

from cudnn_blocks import CaptureError
from cudnn_blocks.plan_cache import PLANS
from tests.contract.op_cases import OP_CASES, clone_operands, restore
from tests.helpers.tensors import assert_same_bits

pytestmark = pytest.mark.gpu
cases = pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def collected():
    """Nothing of an earlier test is collected in a capture: unloading a kernel would end it."""
    gc.collect()


def assert_same(actual, expected):
    for name, tensor in actual.items():
        if tensor is not None:
            assert_same_bits(tensor, expected[name], name)


def allocations() -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"]


@cases
def test_no_allocation(case):
    op = case.build(CUDA).compiled()
    extra = op.workspace()
    before = allocations()
    for _ in range(3):
        op.run(op.operands, **extra)
    assert allocations() == before


@cases
def test_the_first_execute_allocates_nothing_either(case):
    """Nothing is left for the first launch: modules are loaded by ``compile``."""
    op = case.build(CUDA)
    extra = op.workspace()
    op.compiled()
    before = allocations()
    op.run(op.operands, **extra)
    assert allocations() == before


@cases
def test_no_host_sync(case):
    op = case.build(CUDA).compiled()
    extra = op.workspace()
    op.run(op.operands, **extra)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        op.run(op.operands, **extra)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@cases
def test_execute_returns_while_the_stream_is_busy(case):
    op = case.build(CUDA).compiled()
    extra = op.workspace()
    op.run(op.operands, **extra)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    op.run(op.operands, **extra)
    assert not torch.cuda.current_stream().query(), "execute waited for the device"
    torch.cuda.synchronize()


@cases
@pytest.mark.parametrize("is_warm", [False, True], ids=["never-run", "warm"])
def test_capture_and_replay_twice(case, is_warm):
    op = case.build(CUDA).compiled()
    extra, start = op.workspace(), op.clone()
    if is_warm:
        op.run(clone_operands(start), **extra)
    eager = clone_operands(start)
    snapshots = [clone_operands(op.run(eager, **extra)) for _ in range(2)]

    captured = clone_operands(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(captured, **extra)
    torch.cuda.synchronize()
    assert_same(captured, start)  # a capture runs nothing
    if not case.is_in_place:
        captured[op.result].zero_()
    for buffer in extra.values():
        buffer.fill_(0xFF)
    for snapshot in snapshots:
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, snapshot)

    restore(captured, start)  # contents are read at replay, whatever was there at capture
    if not case.is_in_place:
        captured[op.result].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same(captured, snapshots[0])


@cases
def test_changed_inputs_are_read_at_replay(case):
    op = case.build(CUDA).compiled()
    extra, captured = op.workspace(), op.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(captured, **extra)
    for name, tensor in captured.items():
        if tensor is None or not tensor.is_floating_point() or name in op.mutated:
            continue
        if tensor.element_size() > 1:  # torch has no arithmetic of codes
            tensor.mul_(-0.5)
    expected = clone_operands(captured)
    op.run(expected, **op.workspace())
    graph.replay()
    torch.cuda.synchronize()
    assert_same(captured, expected)


@cases
@pytest.mark.parametrize("call", ["execute", "compile", "__call__"])
def test_a_cold_plan_in_a_capture(case, call):
    op = case.build(CUDA)
    op.plan.check_support()
    extra, dummy = op.workspace(), torch.zeros(1, device=CUDA)
    before = op.clone()
    graph = torch.cuda.CUDAGraph()

    def in_a_capture():
        with torch.cuda.graph(graph):
            dummy.add_(1)
            if call == "compile":
                op.plan.compile()
            else:
                getattr(op.plan, call)(**op.operands, **extra)

    with pytest.raises(CaptureError, match=r"call compile\(\)"):
        in_a_capture()
    torch.cuda.synchronize()
    assert_same(op.operands, before)
    op.compiled()
    op.check(before, op.run(op.operands, **extra))  # the process is none the worse


@pytest.mark.parametrize(
    "case", [case for case in OP_CASES if case.functional], ids=lambda case: case.name
)
def test_a_cold_functional_call_in_a_capture(case):
    """S24: cold, then eager, then a warm capture whose two replays are two eager calls."""
    op = case.build(CUDA)
    start, dummy = op.clone(), torch.zeros(1, device=CUDA)
    PLANS.clear()
    cold = clone_operands(start)

    def in_a_capture():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dummy.add_(1)
            case.functional(cold)

    with pytest.raises(CaptureError, match="the same functional call"):
        in_a_capture()
    torch.cuda.synchronize()
    assert_same(cold, start)
    assert PLANS.stats().size == 0

    eager = clone_operands(start)
    outs = [case.functional(eager).clone() for _ in range(2)]
    captured = clone_operands(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.functional(captured)
    for expected in outs:
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(out, expected, "out")
    assert_same(captured, eager)


@cases
def test_a_plan_survives_the_collection_of_its_graph(case):
    op = case.build(CUDA).compiled()
    extra, captured, expected = op.workspace(), op.clone(), op.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op.run(captured, **extra)
    del graph
    gc.collect()
    before = op.clone()
    op.check(before, op.run(expected, **extra))
