# SPDX-License-Identifier: Apache-2.0
"""S23: everything runs on the stream that was asked for, while the default stream is parked."""

from __future__ import annotations

import pytest
import torch

from tests.contract.op_cases import OP_CASES, clone_operands
from tests.helpers.tensors import assert_same_bits

pytestmark = pytest.mark.gpu
cases = pytest.mark.parametrize("case", OP_CASES, ids=lambda case: case.name)
CUDA = torch.device("cuda", 0)
PARK_CYCLES = 400_000_000
"""About 0.2 s on an H200."""


def spelled(kind: str, stream: torch.cuda.Stream):
    from cuda.bindings import driver

    return {
        "torch": stream,
        "int": stream.cuda_stream,
        "CUstream": driver.CUstream(stream.cuda_stream),
    }[kind]


def spoil(operands):
    """Values that would be noticed if a kernel read them: NaN, or slots that are padding."""
    for tensor in operands.values():
        if tensor is not None:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def assert_on_stream(case, run):
    """``run(op, operands, extra, side)`` launches on ``side``; the default stream is parked."""
    op = case.build(CUDA).compiled()
    fresh, extra = op.clone(), op.workspace()
    expected = op.run(clone_operands(fresh), **extra)
    used = clone_operands(fresh)
    side = torch.cuda.Stream()
    for _ in range(4):
        spoil(used)
        torch.cuda.synchronize()
        torch.cuda._sleep(PARK_CYCLES)
        with torch.cuda.stream(side):
            for name, tensor in used.items():
                if tensor is not None:
                    tensor.copy_(fresh[name])
        run(op, used, extra, side)
        side.synchronize()
        assert not torch.cuda.default_stream().query(), "the default stream was waited for"
        with torch.cuda.stream(side):
            for name, tensor in used.items():
                if tensor is not None:
                    assert_same_bits(tensor, expected[name], name)
        torch.cuda.synchronize()


@cases
def test_the_ambient_stream(case):
    def run(op, operands, extra, side):
        with torch.cuda.stream(side):
            op.run(operands, **extra)

    assert_on_stream(case, run)


@cases
@pytest.mark.parametrize("kind", ["torch", "int", "CUstream"])
def test_an_explicit_stream_from_the_parked_default(case, kind):
    def run(op, operands, extra, side):
        op.run(operands, current_stream=spelled(kind, side), **extra)

    assert_on_stream(case, run)


@cases
def test_an_explicit_stream_goes_before_the_ambient_one(case):
    other = torch.cuda.Stream()

    def run(op, operands, extra, side):
        with torch.cuda.stream(other):
            torch.cuda._sleep(PARK_CYCLES)
            op.run(operands, current_stream=side, **extra)

    assert_on_stream(case, run)


@cases
def test_the_callers_stream_and_device_stay_current(case):
    op = case.build(CUDA).compiled()
    side, ambient = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()  # the operands were written on the default stream
    with torch.cuda.stream(ambient):
        op.run(op.operands, current_stream=side, **op.workspace())
        assert torch.cuda.current_stream() == ambient
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize()


@cases
def test_no_kernel_on_the_default_stream(case):
    """What the profiler saw, so that no helper kernel of ours hides on another stream."""
    from torch.profiler import ProfilerActivity, profile

    op = case.build(CUDA).compiled()
    extra, side = op.workspace(), torch.cuda.Stream()
    marker = torch.zeros(1, device=CUDA)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        marker.add_(1)  # a kernel that is known to be on the default stream
        op.run(op.operands, current_stream=side, **extra)
        torch.cuda.synchronize()
    kernels = [
        (event.device_resource_id, event.name)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    on_default = [stream for stream, name in kernels if "elementwise" in name]
    ours = [stream for stream, name in kernels if "elementwise" not in name]
    assert len(on_default) == 1, kernels
    assert len(ours) >= len(op.plan._stages), kernels  # some stages are several launches
    assert len(set(ours)) == 1, kernels
    assert not set(ours) & set(on_default), kernels
