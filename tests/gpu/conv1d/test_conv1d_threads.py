# SPDX-License-Identifier: Apache-2.0
"""S26: eight threads, cold, on streams of their own: right results, one compile per signature."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cudnn_blocks import ops
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.kernel_cache import KERNELS
from tests.helpers.conv1d_problem import make_problem
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_disk_cache")]
NUM_THREADS, ROUNDS = 8, 20


def call(problem):
    return ops.causal_conv1d_update(
        problem.x, problem.conv_state, problem.weight, problem.bias, problem.activation
    )


def in_threads(problems):
    """Runs one problem a thread, each on its own stream, all starting together."""
    barrier = threading.Barrier(NUM_THREADS)

    def work(problem):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            barrier.wait(60)
            out = call(problem)
        stream.synchronize()
        return problem.with_(out=out)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(work, problems))


def check_rounds(make, signatures):
    for round_ in range(ROUNDS):
        problems = [make(i, round_) for i in range(NUM_THREADS)]
        serial = [p.clone() for p in problems]
        torch.cuda.synchronize()
        PLANS.clear()
        compiled = KERNELS.stats().compiled
        done = in_threads(problems)
        now = KERNELS.stats().compiled - compiled
        assert now == (signatures if round_ == 0 else 0), f"round {round_}: {now} compiles"
        assert PLANS.stats().misses == signatures
        for thread, (ours, alone) in enumerate(zip(done, serial, strict=True)):
            expected = call(alone)
            assert_same_bits(ours.out, expected, f"round {round_} thread {thread}: out")
            assert_same_bits(ours.conv_state, alone.conv_state, f"round {round_}: state")


CHANNELS = itertools.count(3 * 8 * 101, 8)
"""Numbers of channels that no other test compiles, so that every first round is cold."""


@pytest.mark.timeout(300)
def test_eight_threads_with_one_signature():
    channels = next(CHANNELS)
    check_rounds(lambda i, _: make_problem(i + 1, channels, device="cuda"), 1)


@pytest.mark.timeout(300)
def test_eight_threads_with_eight_signatures():
    channels = [next(CHANNELS) for _ in range(NUM_THREADS)]
    check_rounds(lambda i, _: make_problem(3, channels[i], device="cuda"), NUM_THREADS)


def test_one_plan_in_eight_threads():
    problems = [make_problem(5, 520, device="cuda") for _ in range(NUM_THREADS)]
    expected = [p.clone().run() for p in problems]
    plan = problems[0].plan()
    barrier = threading.Barrier(NUM_THREADS)
    torch.cuda.synchronize()

    def work(problem):
        stream = torch.cuda.Stream()
        barrier.wait(60)
        plan.compile()
        problem.execute(plan, current_stream=stream)
        stream.synchronize()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(work, problems))
    for ours, alone in zip(problems, expected, strict=True):
        assert_same_bits(ours.out, alone.out, "out")
        assert_same_bits(ours.conv_state, alone.conv_state, "state")
