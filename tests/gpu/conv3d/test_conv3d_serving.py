# SPDX-License-Identifier: Apache-2.0
"""Workspaces in graphs, explicit streams of the functions, threads (S22, S24, S26, S28)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.kernel_cache import KERNELS
from tests.helpers.conv3d_forms import CAUSAL, KINDS, RAW
from tests.helpers.conv3d_gpu import CUDA
from tests.helpers.conv3d_problem import assert_exact, make_problem
from tests.helpers.tensors import assert_same_bits, guarded_copy

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # a convolution compiles for many seconds
NUM_THREADS = 8
PARK_CYCLES = 2_000_000_000  # a second: other processes may share the GPU


@pytest.mark.parametrize("history_frames", range(3))
def test_the_causal_scratch_in_a_guarded_workspace_and_a_graph(history_frames):
    problem = make_problem(
        CAUSAL, (2, 3, 17, 33), device=CUDA, history_frames=history_frames, has_padded_input=False
    )
    plan, expected = problem.compiled(), problem.expected()
    workspace, buffer = guarded_copy(problem.workspace(plan)["workspace"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.execute(plan, workspace=workspace)
    for fill in (0xFF, 0):
        workspace.fill_(fill)
        for tensor in problem.written.values():
            tensor.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert buffer.is_intact()
        torch.testing.assert_close(problem["output"], expected["output"], atol=0.02, rtol=0.02)
        assert_same_bits(problem["cache_output"], expected["cache_output"], "cache_output")


@pytest.mark.parametrize("kind", KINDS)
def test_the_function_on_an_explicit_stream(kind):
    """S23: outputs and scratch belong to the stream of the launch; the default one is parked."""
    channels = (24, 40)
    problem = make_problem(kind, (1, 2, 17, 33), channels, device=CUDA, residual="add")
    expected = {n: t.clone() for n, t in problem.call().items() if t is not None}
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for spelled in (side, side.cuda_stream):
        torch.cuda._sleep(PARK_CYCLES)
        called = [problem.call(current_stream=spelled) for _ in range(4)]
        side.synchronize()
        assert not torch.cuda.default_stream().query(), "the default stream was waited for"
        with torch.cuda.stream(side):
            for results in called:
                for name, tensor in expected.items():
                    assert_same_bits(results[name], tensor, name)
        torch.cuda.synchronize()


def test_history_frames_with_equal_shapes():
    """S22: zeroed planes and kept ones, whatever ran before."""
    problems = [
        make_problem("norm_pad", (1, 3, 9, 13), (160, 160), device=CUDA, history_frames=p)
        for p in range(3)
    ]
    for p in (2, 0, 1, 2):
        problem = problems[p].clone().run()
        planes = problem["padded_output"][:, :2, 1:-1, 1:-1]
        assert not planes[:, : 2 - p].any()
        assert planes[:, 2 - p :].isnan().all()


@pytest.mark.parametrize("copy_first", [True, False])
def test_history_copied_before_or_after_gives_the_same_bits(copy_first):
    problem = make_problem("norm_pad", (1, 1, 9, 13), (160, 160), device=CUDA, history_frames=2)
    torch.manual_seed(5)
    history = torch.randn(1, 2, 9, 13, 160, device=CUDA).to(torch.bfloat16)
    plan = problem.compiled()

    def copy(ours):
        ours["padded_output"][:, :2, 1:-1, 1:-1] = history
        ours["cache_output"][:, :1] = history[:, -1:]

    runs = []
    for first in (copy_first, not copy_first):
        ours = problem.clone()
        if first:
            copy(ours)
        ours.execute(plan)
        if not first:
            copy(ours)
        runs.append(ours.written)
    assert_exact(runs[0], runs[1])
    assert not any(tensor.isnan().any() for tensor in runs[0].values())


def in_threads(problems):
    barrier = threading.Barrier(NUM_THREADS)

    def work(problem):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            barrier.wait(60)
            results = problem.call()
        stream.synchronize()
        return results

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(work, problems))


@pytest.mark.parametrize("num_signatures", [1, NUM_THREADS])
def test_eight_cold_threads(num_signatures):
    """S26: one compile per signature, results as in one thread."""
    # Channels that no other test compiles, so that the first round is cold.
    first = 1000 if num_signatures == 1 else 1200
    for round_ in range(5):
        problems = [
            make_problem(
                "norm_only", (1, 2, 5, 7), (8, first + 8 * (i % num_signatures)), device=CUDA
            )
            for i in range(NUM_THREADS)
        ]
        torch.cuda.synchronize()
        PLANS.clear()
        before = KERNELS.stats().compiled
        done = in_threads(problems)
        compiled = KERNELS.stats().compiled - before
        assert compiled <= (num_signatures if round_ == 0 else 0)
        for results, problem in zip(done, problems, strict=True):
            for name, tensor in problem.call().items():
                if tensor is not None:
                    assert_same_bits(results[name], tensor, name)


def test_execute_allocates_nothing_and_does_not_wait():
    problem = make_problem(RAW, (1, 2, 33, 33), (160, 160), device=CUDA)
    plan = problem.compiled()
    problem.execute(plan)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.execute(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
