# SPDX-License-Identifier: Apache-2.0
"""Attention in service: empty sequences without a hang, threads, streams, kernels found again."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cudnn_blocks import ops
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.kernel_cache import KERNELS
from tests.helpers.sdpa_gpu import CUDA, D_HEADS, ENGINES, compiled_plan, plan_options
from tests.helpers.sdpa_problem import assert_matches, make_problem
from tests.helpers.tensors import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("no_disk_cache"),
]
engines = pytest.mark.parametrize("engine", ENGINES)
NUM_THREADS = 8


@engines
@pytest.mark.parametrize("d_head", D_HEADS)
def test_empty_sequences_do_not_hang(d_head, engine):
    """S15: lengths of 0 in every place, twenty times, and the rows of the others are right."""
    options = {"d_head": d_head, "heads": (4, 2), "has_gate": True}
    orders = ((0, 4, 0), (4, 0, 0), (0, 0, 4), (0, 0, 0), (4, 4, 0))
    for lens in itertools.islice(itertools.cycle(orders), 20):
        problem = make_problem(3, 4, device=CUDA, seq_lens=lens, **options)
        problem.run(compiled_plan(engine, **plan_options({**options, "seq_lens": lens})))
        assert_matches(problem, problem.expected(), f"{lens}")
        for entry, length in enumerate(lens):
            if length == 0:
                assert torch.equal(problem["o"][entry], torch.zeros_like(problem["o"][entry]))


@engines
def test_lengths_are_read_on_the_device(engine):
    """New lengths in the same tensor count at the next launch, and at a replay."""
    options = {"d_head": 64, "heads": (2, 1), "seq_lens": (100, 100)}
    problem = make_problem(2, 100, device=CUDA, **options)
    plan = compiled_plan(engine, **plan_options(options))
    problem.run(plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.run(plan)
    for lens in ((3, 70), (0, 100), (64, 65)):
        problem["seq_lens"].copy_(torch.tensor(lens))
        graph.replay()
        assert_matches(problem, problem.expected(), f"{lens}")


def test_every_length_finds_the_kernel():
    """S22: one compile for all lengths and batches; other masks compile their own."""
    problem = make_problem(1, 9, heads=(10, 5), device=CUDA, has_lse=False)
    q, k, v = (problem[name] for name in ("q", "k", "v"))
    ops.sdpa_fwd(q, k, v)
    compiled = KERNELS.stats().compiled
    for b, s in ((1, 1), (2, 100), (3, 1000), (1, 4097)):
        one = make_problem(b, s, heads=(10, 5), device=CUDA, has_lse=False)
        o = ops.sdpa_fwd(one["q"], one["k"], one["v"], attn_scale=0.3)
        wanted = make_problem(1, 1, heads=(10, 5), attn_scale=0.3).geometry
        one = type(one)(wanted, {**one.operands, "o": o})
        assert_matches(one, one.expected(), f"{b} {s}")
    assert KERNELS.stats().compiled == compiled
    for mask in ({"window_left": 3}, {"window_left": 4}, {"is_causal": False}):
        o = ops.sdpa_fwd(q, k, v, **mask)
        one = make_problem(1, 9, heads=(10, 5), device=CUDA, has_lse=False, **mask)
        one = one.with_(q=q, k=k, v=v, o=o)
        assert_matches(one, one.expected(), f"{mask}")
    assert KERNELS.stats().compiled == compiled + 3


def test_eight_threads():
    """S26: cold, on streams of their own; the same signature, then eight of them."""
    for heads in ([(9, 3)] * NUM_THREADS, [(n, 1) for n in range(17, 17 + NUM_THREADS)]):
        problems = [make_problem(2, 150, heads=one, device=CUDA) for one in heads]
        torch.cuda.synchronize()
        PLANS.clear()
        compiled = KERNELS.stats().compiled
        barrier = threading.Barrier(NUM_THREADS)

        def work(problem, barrier=barrier):
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait(60)
                out = ops.sdpa_fwd(problem["q"], problem["k"], problem["v"], return_lse=True)
                torch.cuda.current_stream().synchronize()
            return out

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            done = list(pool.map(work, problems))
        assert KERNELS.stats().compiled - compiled == len(set(heads))
        for problem, (o, lse) in zip(problems, done, strict=True):
            alone = ops.sdpa_fwd(problem["q"], problem["k"], problem["v"], return_lse=True)
            assert_same_bits(o, alone[0], "o")
            assert_same_bits(lse, alone[1], "lse")
            assert_matches(problem.with_(o=o, lse=lse), problem.expected())


def test_the_function_on_an_explicit_stream():
    """S23: outputs belong to the stream of the launch; the default one is parked."""
    problem = make_problem(2, 100, device=CUDA)
    q, k, v = (problem[name] for name in ("q", "k", "v"))
    expected = ops.sdpa_fwd(q, k, v).clone()
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for spelled in (side, side.cuda_stream):
        torch.cuda._sleep(400_000_000)
        result = ops.sdpa_fwd(q, k, v, current_stream=spelled)
        side.synchronize()
        assert not torch.cuda.default_stream().query(), "the default stream was waited for"
        with torch.cuda.stream(side):
            assert_same_bits(result, expected, "o")


@engines
def test_bits_do_not_change_from_run_to_run(engine):
    options = {"d_head": 128, "heads": (8, 2), "seq_lens": (1000, 313)}
    problem = make_problem(2, 1000, device=CUDA, **options)
    plan = compiled_plan(engine, **plan_options(options))
    first = problem.clone().run(plan)
    for _ in range(20):
        again = problem.clone().run(plan)
        for name in ("o", "lse"):
            assert_same_bits(again[name], first[name], name)
