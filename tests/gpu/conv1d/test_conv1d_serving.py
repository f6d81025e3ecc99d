# SPDX-License-Identifier: Apache-2.0
"""The functional form in a serving process: compiles, allocation, explicit streams."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import ContractError, ops
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.kernel_cache import KERNELS
from tests.helpers.conv1d_problem import assert_matches, expect, make_problem
from tests.helpers.tensors import assert_same_bits, clone_exact

pytestmark = pytest.mark.gpu


class CountingCompile:
    """Stands in for ``cute.compile``, with options in brackets or without."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []

    def __call__(self, *args, **kwargs):
        self.calls.append(args)
        return self.inner(*args, **kwargs)

    def __getitem__(self, options):
        counting = CountingCompile(self.inner[options])
        counting.calls = self.calls
        return counting

    def __getattr__(self, name):
        return getattr(self.inner, name)


@pytest.fixture
def compiles(monkeypatch, no_disk_cache):
    from cutlass import cute

    counting = CountingCompile(cute.compile)
    monkeypatch.setattr(cute, "compile", counting)
    return counting.calls


def call(problem, **options):
    return ops.causal_conv1d_update(
        problem.x,
        problem.conv_state,
        problem.weight,
        problem.bias,
        problem.activation,
        conv_state_indices=problem.indices,
        **options,
    )


@pytest.mark.parametrize("indices", [None, "shuffled"])
def test_two_hundred_batch_sizes_compile_as_often_as_one(compiles, indices):
    channels = 776 if indices is None else 784  # compiled by no other test
    call(make_problem(1, channels, device="cuda", indices=indices))
    assert len(compiles) == 1
    for num_rows in range(1, 201):
        problem = make_problem(num_rows, channels, device="cuda", indices=indices)
        call(problem)
    assert len(compiles) == 1
    assert PLANS.stats().misses == 1
    expected = expect(problem)
    out = call(problem)
    assert_matches(problem.with_(out=out), expected)


def test_plans_of_two_hundred_batch_sizes_share_one_kernel(compiles):
    for num_rows in range(1, 201):
        make_problem(num_rows, 792, device="cuda").compiled()
    assert len(compiles) == 1


def test_a_dropped_plan_finds_its_kernel(compiles):
    for _ in range(3):
        PLANS.clear()
        call(make_problem(3, 808, device="cuda"))
    assert len(compiles) == 1
    assert KERNELS.stats().found > 0


def test_a_warm_call_allocates_its_output_and_nothing_else():
    problem = make_problem(64, 2048, device="cuda")
    call(problem)
    stats = torch.cuda.memory_stats
    before = stats()["allocation.all.allocated"]
    out = call(problem)
    assert stats()["allocation.all.allocated"] == before + 1
    assert out.shape == problem.out.shape


def test_a_warm_call_does_not_sync():
    problem = make_problem(64, 2048, device="cuda")
    call(problem)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(problem)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def spelled(kind, stream):
    from cuda.bindings import driver

    return {
        "torch": stream,
        "int": stream.cuda_stream,
        "CUstream": driver.CUstream(stream.cuda_stream),
    }[kind]


@pytest.mark.parametrize("kind", ["torch", "int", "CUstream"])
def test_an_explicit_stream_while_the_default_is_parked(kind):
    problem = make_problem(64, 2048, device="cuda")
    warm = problem.clone()
    expected = call(warm)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    out = call(problem, current_stream=spelled(kind, side))
    side.synchronize()
    assert not torch.cuda.default_stream().query(), "the default stream was waited for"
    torch.cuda.synchronize()
    assert_same_bits(out, expected, "out")
    assert_same_bits(problem.conv_state, warm.conv_state, "state")


@pytest.mark.parametrize("kind", ["torch", "int", "CUstream"])
def test_the_output_is_not_handed_out_again_while_its_stream_runs(kind):
    """The output of a call on a busy side stream is dropped; its memory must not be reused yet."""
    problem = make_problem(64, 2048, device="cuda")
    expected = call(problem.clone())
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
    out = call(problem, current_stream=spelled(kind, side))
    kept = torch.empty_like(out)
    with torch.cuda.stream(side):
        kept.copy_(out)
    del out
    for _ in range(8):  # the ambient stream allocates and writes at once
        torch.full_like(kept, float("nan"))
    torch.cuda.synchronize()
    assert_same_bits(kept, expected, "out")


def test_an_explicit_stream_is_not_left_current():
    problem = make_problem(3, 520, device="cuda")
    before = torch.cuda.current_stream()
    call(problem, current_stream=torch.cuda.Stream())
    assert torch.cuda.current_stream() == before


@pytest.mark.parametrize("handle", [0, 1])
def test_the_default_stream_by_its_handle(handle):
    problem = make_problem(3, 520, device="cuda")
    expected = expect(problem)
    out = call(problem, current_stream=handle)
    assert_matches(problem.with_(out=out), expected)


@pytest.mark.parametrize("stream", ["0", 1.5, object()])
def test_streams_of_a_wrong_type(stream):
    problem = make_problem(3, 520, device="cuda")
    before = clone_exact(problem.conv_state)
    with pytest.raises(TypeError, match="^current_stream: expected"):
        call(problem, current_stream=stream)
    assert_same_bits(problem.conv_state, before, "state")


def test_mixed_devices_are_refused():
    problem = make_problem(3, 520, device="cuda")
    for name in ("x", "conv_state", "weight"):
        given = {n: problem.operands[n] for n in ("x", "conv_state", "weight")}
        given[name] = given[name].cpu()
        with pytest.raises(ContractError, match="expected a tensor on"):
            ops.causal_conv1d_update(*given.values())
    expected = expect(problem)
    assert_matches(problem.with_(out=call(problem)), expected)


def test_an_empty_batch_launches_nothing_and_breaks_nothing():
    problem = make_problem(0, 520, device="cuda", num_slots=4, indices=[])
    before = clone_exact(problem.conv_state)
    assert call(problem).shape == (0, 520)
    torch.cuda.synchronize()
    assert_same_bits(problem.conv_state, before, "state")
    graph = torch.cuda.CUDAGraph()
    marker = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        marker.add_(1)
        call(problem)
    graph.replay()
    torch.cuda.synchronize()
    assert marker.item() == 1


def test_a_plan_for_a_named_target_runs_on_a_device_of_that_target():
    """Compiled from meta samples, executed on what is there."""
    from cudnn_blocks import Target

    name = Target.of_device(torch.device("cuda", 0)).name
    problem = make_problem(3, 520, device="cuda")
    metas = {
        field: getattr(problem, field).to("meta") for field in ("x", "conv_state", "weight", "out")
    }
    plan = problem.with_(**metas).compiled(target=name)
    expected = expect(problem)
    problem.execute(plan)
    assert_matches(problem, expected)


def test_one_element_axes_may_have_any_stride():
    """A one-row slice of a wide buffer is contiguous whatever its pitch says (S07)."""
    wide = torch.randn(4, 1024, device="cuda").bfloat16()
    problem = make_problem(1, 520, device="cuda")
    problem = problem.with_(x=wide[:1, :520].as_strided((1, 520), (999, 1)))
    table = torch.zeros(1, 5, dtype=torch.int32, device="cuda")
    expected = expect(problem)
    assert_matches(problem.clone().with_(x=problem.x).run(), expected)
    routed = problem.with_(indices=table[:, 0].as_strided((1,), (5,)))
    expected = expect(routed)
    assert_matches(routed.run(), expected)
