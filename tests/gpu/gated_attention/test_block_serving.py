# SPDX-License-Identifier: Apache-2.0
"""The block in service: streams, graphs, threads, mixed engines, one compile for every length."""

from __future__ import annotations

import dataclasses
import functools
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cudnn_blocks import CaptureError, ContractError, NotServedError, ops
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.kernel_cache import KERNELS as KERNEL_CACHE
from tests.helpers.gated_attention_gpu import (
    CUDA,
    CUDNN,
    CUDNN_STAGES,
    HAS_CUDNN,
    HAS_HOPPER,
    LARGEST,
    assert_matches,
    compiled_block,
    problem_of,
    run,
)
from tests.helpers.gated_attention_problem import KNOBS, READ
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]  # the first test of a kernel compiles it
UNFUSED, FUSED = KNOBS[0], KNOBS[-1]
PARK_CYCLES = 400_000_000
"""About 0.2 s on an H200."""
NUM_THREADS = 6

ROUTES = {"default": ({}, FUSED), "portable attention": ({"sdpa": "portable"}, FUSED)}
if HAS_HOPPER:
    ROUTES["portable projections"] = (
        {"qkv_gate_proj": "portable", "out_proj": "portable"},
        UNFUSED,
    )
if HAS_CUDNN:
    ROUTES |= {f"cudnn {slot}": ({slot: CUDNN}, UNFUSED) for slot in CUDNN_STAGES}
    ROUTES["cudnn everywhere"] = (dict.fromkeys(CUDNN_STAGES, CUDNN), UNFUSED)
routes = pytest.mark.parametrize("route", list(ROUTES))


def make(route, tokens=200, batch=2, **options):
    """A problem of the route; cuDNN's attention takes no lengths."""
    engines, knobs = ROUTES[route]
    if engines.get("sdpa") == CUDNN:
        options["seq_lens"] = None
    return problem_of("d128", batch, tokens, **options, **knobs)


@functools.cache
def block_of(route, tokens=200, batch=2):
    """A plan for these extents: smaller ones are not served by every engine."""
    engines, _ = ROUTES[route]
    return make(route, tokens, batch).compiled(engines=engines or None)


def spoil(problem):
    """Values that would be noticed if a kernel read them before the copy on its stream."""
    for tensor in problem.operands.values():
        if tensor is not None:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


@routes
def test_numbers_of_every_route(route):
    plan, (engines, _) = block_of(route), ROUTES[route]
    problem = make(route, seq_lens=[200, 90])
    assert_matches(run(plan, problem), problem, route)
    chosen = {stage.stage: stage.engine for stage in plan.probe().stages}
    for slot, engine in engines.items():
        assert chosen[slot] == engine
        assert f"{slot}: {engine}" in plan.describe()


@routes
@pytest.mark.parametrize("is_explicit", [False, True], ids=["ambient", "explicit"])
def test_every_stage_is_on_the_one_stream(route, is_explicit):
    """S23: the default stream is parked, operands are written on a side stream; bitwise equal."""
    plan, fresh = block_of(route), make(route, seq_lens=[200, 90])
    expected, used = run(plan, fresh), fresh.clone()
    workspace, side = used.workspace(plan), torch.cuda.Stream()
    with torch.cuda.stream(side):  # the first call on a stream makes cuDNN's handle, which waits
        run(plan, fresh.clone())
    for _ in range(4):
        spoil(used)
        workspace.fill_(0xFF)
        torch.cuda.synchronize()
        torch.cuda._sleep(PARK_CYCLES)
        with torch.cuda.stream(side):
            for name, tensor in used.operands.items():
                if tensor is not None:
                    tensor.copy_(fresh[name])
            if not is_explicit:
                used.execute(plan, workspace=workspace)
        if is_explicit:
            used.execute(plan, workspace=workspace, current_stream=side)
        side.synchronize()
        assert not torch.cuda.default_stream().query(), "the default stream was waited for"
        with torch.cuda.stream(side):
            assert_same_bits(used["out"], expected["out"], "out")
            assert_same_bits(used["lse"], expected["lse"], "lse")
        torch.cuda.synchronize()


def assert_replays(plan, captured, others):
    """A capture of one call, replayed over the contents of others: as eager, bit for bit."""
    workspace, graph = captured.workspace(plan), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.execute(plan, workspace=workspace)
    for other in others:
        for name, tensor in other.operands.items():
            if tensor is not None and name not in ("out", "lse"):
                captured[name].copy_(tensor)
        captured["out"].zero_()
        workspace.fill_(0xFF)
        graph.replay()
        eager = run(plan, other)
        assert_same_bits(captured["out"], eager["out"], "out")
        assert_same_bits(captured["lse"], eager["lse"], "lse")


@routes
def test_capture_and_replay(route):
    plan = block_of(route)
    run(plan, make(route))  # cuDNN needs a warm stream, as its own message says
    assert_replays(plan, make(route), [make(route, seq_lens=[200 - i, 90 + i]) for i in range(3)])


@pytest.mark.parametrize(("batch", "tokens"), [(3, 1024), (1, 77), (2, 1)])
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_capture_and_replay_of_calls_smaller_than_the_samples(batch, tokens, knobs):
    plan = compiled_block("d128", **knobs)

    def problem(length):
        return problem_of("d128", batch, tokens, seq_lens=[length] * batch, **knobs)

    others = [problem(max(tokens - i, 0)) for i in range(3)]
    assert_replays(plan, problem(tokens), others)


@routes
def test_a_warm_call_allocates_nothing_and_does_not_sync(route):
    plan, problem = block_of(route), make(route)
    workspace = problem.workspace(plan)
    problem.execute(plan, workspace=workspace)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.execute(plan, workspace=workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@routes
def test_back_to_back_calls_share_a_workspace(route):
    """Kernels of one call may start while those of the call before end, and not run into them."""
    plan = block_of(route)
    problems = [make(route, seq_lens=[200 - i, i]) for i in range(5)]
    alone = [run(plan, problem)["out"] for problem in problems]
    workspace = problems[0].workspace(plan)
    for _ in range(10):
        results = [problem.clone() for problem in problems]
        torch.cuda.synchronize()
        for result in results:
            result.execute(plan, workspace=workspace)
        for result, expected in zip(results, alone, strict=True):
            assert_same_bits(result["out"], expected, "out")


def test_back_to_back_calls_of_other_lengths_share_a_workspace():
    plan = compiled_block("d128", **FUSED)
    problems = [problem_of("d128", 3, n, **FUSED) for n in (1, 200, 31, 1024, 64)]
    alone = [run(plan, problem)["out"] for problem in problems]
    workspace = problems[0].workspace(plan)
    for _ in range(10):
        results = [problem.clone() for problem in problems]
        torch.cuda.synchronize()
        for result in results:
            result.execute(plan, workspace=workspace)
        for result, expected in zip(results, alone, strict=True):
            assert_same_bits(result["out"], expected, "out")


def test_two_streams_run_one_plan_at_once():
    """Nothing of a call is kept in the plan: only workspaces have to be apart."""
    plan, knobs = compiled_block("d128", **FUSED), FUSED
    problems = [problem_of("d128", 3, 1024, seq_lens=[n, n, n], **knobs) for n in (1024, 600)]
    alone = [run(plan, problem)["out"] for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    workspaces = [problem.workspace(plan) for problem in problems]
    results = [problem.clone() for problem in problems]
    torch.cuda.synchronize()
    for _ in range(20):
        for result, workspace, stream in zip(results, workspaces, streams, strict=True):
            result.execute(plan, workspace=workspace, current_stream=stream)
    torch.cuda.synchronize()
    for result, expected in zip(results, alone, strict=True):
        assert_same_bits(result["out"], expected, "out")


def test_threads_with_streams_of_their_own():
    """S26: one plan, and functional calls that all miss the plan cache at once."""
    plan, knobs = compiled_block("d128", **FUSED), FUSED
    problem = problem_of("d128", 2, 300, **knobs)
    expected = run(plan, problem)["out"]
    PLANS.clear()
    barrier = threading.Barrier(NUM_THREADS)

    def work(index):
        stream = torch.cuda.Stream()
        mine = problem.clone()
        torch.cuda.synchronize()
        barrier.wait()
        with torch.cuda.stream(stream):
            for _ in range(5):
                mine.execute(plan)
            out, _ = call(mine)
        stream.synchronize()
        return mine["out"], out

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for planned, functional in pool.map(work, range(NUM_THREADS)):
            assert_same_bits(planned, expected, "planned")
            assert_same_bits(functional, expected, "functional")
    assert PLANS.stats().misses == 1


def call(problem, **extra):
    """The functional form with the fused knobs."""
    operands = [problem.operands[name] for name in READ]
    seq_lens = problem.operands["seq_lens"]
    return ops.gated_attention(
        *operands, problem.geometry, seq_lens=seq_lens, return_lse=True, **FUSED, **extra
    )


def test_every_smaller_call_finds_the_kernels_compiled():
    plan, knobs = compiled_block("d128", **FUSED), FUSED
    before = KERNEL_CACHE.stats().compiled
    for batch in range(1, LARGEST[0] + 1):
        for tokens in (*range(1, 140), 511, 512, 513, 1024):
            problem_of("d128", batch, tokens, **knobs).execute(plan)
    assert KERNEL_CACHE.stats().compiled == before


def test_scale_and_eps_are_not_compiled_in():
    compiled_block("d128", **FUSED)
    before, knobs = KERNEL_CACHE.stats().compiled, FUSED
    problem = problem_of("d128", 2, 130, **knobs)
    for changes in ({"attn_scale": 0.3}, {"qk_norm_eps": 0.5}):
        geometry = dataclasses.replace(problem.geometry, **changes)
        large = dataclasses.replace(problem_of("d128", *LARGEST, **knobs), geometry=geometry)
        other = dataclasses.replace(problem, geometry=geometry)
        assert_matches(run(large.compiled(), other), other, str(changes))
    assert KERNEL_CACHE.stats().compiled == before


def test_an_empty_call_launches_nothing():
    plan, knobs = compiled_block("d128", **FUSED), FUSED
    graph, marker = torch.cuda.CUDAGraph(), torch.zeros(1, device=CUDA)
    for batch, tokens in ((0, 8), (2, 0)):
        empty = problem_of("d128", batch, tokens, table_rows=8, seq_lens=[0] * batch, **knobs)
        workspace = empty.workspace(plan)
        with torch.cuda.graph(graph):
            marker.add_(1)
            empty.execute(plan, workspace=workspace)
        graph.replay()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
    assert marker.item() == 2


def test_a_cold_functional_call_in_a_capture_says_how_to_warm_it():
    problem = problem_of("d128", 2, 33, **FUSED)
    PLANS.clear()
    marker = torch.zeros(1, device=CUDA)

    def in_a_capture():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            marker.add_(1)
            call(problem)

    with pytest.raises(CaptureError, match="the same functional call"):
        in_a_capture()
    torch.cuda.synchronize()
    eager, _ = call(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = call(problem)
    graph.replay()
    assert_same_bits(out, eager, "out")


@pytest.mark.parametrize("is_explicit", [False, True])
def test_functional_outputs_are_allocated_on_the_stream_of_the_launch(is_explicit):
    problem = problem_of("d128", 2, 200, **FUSED)
    expected, _ = call(problem)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(PARK_CYCLES)
    if is_explicit:
        out, _ = call(problem, current_stream=side)
    else:
        with torch.cuda.stream(side):
            out, _ = call(problem)
    side.synchronize()
    assert not torch.cuda.default_stream().query(), "the default stream was waited for"
    torch.cuda.synchronize()
    assert_same_bits(out, expected, "out")


def test_no_operand_is_kept_alive():
    plan, knobs = compiled_block("d128", **FUSED), FUSED
    problem = problem_of("d128", 2, 200, **knobs)
    workspace = problem.workspace(plan)
    problem.execute(plan, workspace=workspace)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    size_bytes = workspace.untyped_storage().nbytes()
    del workspace, problem
    gc.collect()
    assert torch.cuda.memory_allocated() <= before - size_bytes


@pytest.mark.parametrize("slot", CUDNN_STAGES)
def test_a_pin_to_cudnn_is_served_where_the_package_is_and_declines_elsewhere(slot):
    problem = make("default").with_(seq_lens=None).with_knobs(**UNFUSED)
    plan = problem.plan(engines={slot: CUDNN})
    if HAS_CUDNN:
        assert plan.check_support()
        return
    with pytest.raises(NotServedError, match=f"^{slot}: cudnn: cudnn_frontend=None"):
        plan.check_support()


@pytest.mark.parametrize("slot", CUDNN_STAGES)
def test_fused_stages_are_not_cudnns(slot):
    problem = make("default").with_(seq_lens=None)
    pins = {slot.replace("qkv_gate_proj", "qkv_gate_proj_norm_rope"): CUDNN}
    if slot == "out_proj":
        pins = {"sdpa": CUDNN}
    with pytest.raises(NotServedError, match=f"^{next(iter(pins))}: cudnn: "):
        problem.plan(engines=pins).check_support()


def test_cudnns_attention_serves_its_samples_extents_alone():
    """Where the package is; a smaller call is a typed decline before any launch."""
    if not HAS_CUDNN:
        pins = {"sdpa": CUDNN}
        with pytest.raises(NotServedError, match="^sdpa: cudnn: "):
            make("default").with_(seq_lens=None).with_knobs(**UNFUSED).plan(engines=pins).compile()
        return
    plan = block_of("cudnn sdpa")
    smaller = make("cudnn sdpa", tokens=100)
    before = smaller.clone()
    with pytest.raises(NotServedError, match="^sdpa: B=2, S=100, Sk=100 with engine cudnn"):
        smaller.execute(plan)
    assert_same_bits(smaller["out"], before["out"], "out")


def test_cudnns_projections_take_compact_rows_alone():
    if not HAS_CUDNN:
        assert CUDNN_STAGES
        return
    plan, problem = block_of("cudnn out_proj"), make("cudnn out_proj")
    wide = torch.zeros(2, 200, 1024, dtype=torch.float16, device=CUDA)
    with pytest.raises(ContractError, match="^out: expected contiguous"):
        problem.execute(plan, out=wide[..., :512])
