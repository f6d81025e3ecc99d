# SPDX-License-Identifier: Apache-2.0
"""The block's precision modes on a GPU: numbers, lengths, scales, workspace, what declines."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch

from cudnn_blocks import GatedAttentionGeometry
from cudnn_blocks.stages.kernel_cache import KernelBuild
from cudnn_blocks.workspace import GuardedBuffer
from tests.helpers.gated_attention_gpu import CUDA, KERNELS
from tests.helpers.gated_attention_precision import (
    GPU_SLACK,
    MODES,
    PrecisionProblem,
    assert_close_to_stated,
    assert_lse_near,
    assert_small,
    cosine,
    make_precision_problem,
)
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # the first test of a mode compiles it
GEOMETRIES = {
    "d128": GatedAttentionGeometry(256, 6, 2, 128, rope_dim=128, window_left=200),
    "d256": GatedAttentionGeometry(512, 4, 2, 256, rope_dim=64),
}
LARGEST = (3, 400)
modes = pytest.mark.parametrize("name", MODES)


def make(
    name: str, geometry: str = "d256", batch: int = 3, tokens: int = 300, **options
) -> PrecisionProblem:
    """With lengths and LSE, always, so that one kernel serves every test."""
    torch.manual_seed(7)
    options = {"seq_lens": [tokens] * batch, "has_lse": True, "device": CUDA, **options}
    return make_precision_problem(MODES[name], GEOMETRIES[geometry], batch, tokens, **options)


def with_fast_accumulation(problem: PrecisionProblem) -> PrecisionProblem:
    quant = dataclasses.replace(problem.quant, fast_accumulation=True)
    return dataclasses.replace(problem, quant=quant)


@functools.cache
def compiled(name: str, geometry: str = "d256", engine: str | None = None, fast: bool = False):
    """A plan for ``LARGEST``; an engine's name pins every stage that has it."""
    problem = make(name, geometry, *LARGEST)
    if fast:
        problem = with_fast_accumulation(problem)
    pins = None
    if engine is not None:
        pins = {
            stage.stage: engine
            for stage in problem.plan().probe().stages
            if any(row.engine == engine and row.served for row in stage.engines)
        }
    return problem.compiled(engines=pins)


def run(plan, problem: PrecisionProblem) -> PrecisionProblem:
    return problem.clone().execute(plan, workspace=problem.workspace(plan))


def assert_matches(actual: PrecisionProblem, problem: PrecisionProblem) -> None:
    """Out and LSE near the reference engine's on the CPU; rows without a key exactly so.

    An engine may round e4m3 weights against a maximum that lags: half a step of 1 in 16 each, which
    is 0.02 of the row's size where few keys count and averages out where many do. A value of the
    output that crosses the border of an e2m1 code moves by a third of itself.
    """
    expected = problem.to("cpu").run()
    assert_lse_near(actual["lse"], expected["lse"], GPU_SLACK)
    out, wanted = (one["out"].double().cpu() for one in (actual, expected))
    dead = expected["lse"] == -math.inf
    assert bool((out[dead.all(1)] == 0).all())
    power = wanted.square()
    scale = power.mean(-1, keepdim=True).maximum(power.mean()).sqrt()
    assert_small((out - wanted) / scale, 0.03, 0.4 if problem.mode.has_fp4_output else 0.2, "out")


@modes
@pytest.mark.parametrize("engine", KERNELS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_numbers(name, engine, geometry):
    plan = compiled(name, geometry, engine)
    for tokens, lengths in ((300, [300, 131, 0]), (65, [64, 65, 63]), (400, [1, 400, 257])):
        problem = make(name, geometry, 3, tokens, seq_lens=lengths)
        assert_matches(run(plan, problem), problem)


@pytest.mark.parametrize("name", [name for name in MODES if not MODES[name].has_fp4_output])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_fast_accumulation(name, geometry):
    """Sums of up to 1024 codes lose less than the codes themselves: the bounds are the same."""
    problem = with_fast_accumulation(make(name, geometry, seq_lens=[300, 131, 0]))
    assert_matches(run(compiled(name, geometry, fast=True), problem), problem)


@modes
def test_every_element_is_near_the_oracle(name):
    problem = make(name, tokens=70, seq_lens=[70, 23, 0])
    actual = run(compiled(name), problem)
    exact, _ = problem.expected_at(None)
    assert cosine(actual["out"], exact) > problem.mode.cosine
    assert_close_to_stated(actual, GPU_SLACK)


@pytest.mark.parametrize("name", [name for name in MODES if MODES[name].is_per_tensor])
def test_heads_of_64_channels(name):
    torch.manual_seed(8)
    one = GatedAttentionGeometry(256, 4, 4, 64, rope_dim=16)
    problem = make_precision_problem(MODES[name], one, 2, 150, device=CUDA, has_lse=True)
    assert_matches(problem.clone().run(), problem)


@modes
def test_smaller_calls(name):
    plan = compiled(name)
    for batch, tokens in ((1, 1), (2, 7), (1, 129), (3, 64)):
        problem = make(name, batch=batch, tokens=tokens)
        assert_matches(run(plan, problem), problem)
    empty = make(name, batch=0)
    empty.execute(plan, workspace=make(name).workspace(plan))


@modes
@pytest.mark.parametrize("value", [math.nan, 448.0])
def test_nothing_past_the_length_reaches_a_row_before_it(name, value):
    """S14."""
    clean = make(name, batch=2, seq_lens=[37, 300])
    dirty = clean.clone()
    for problem, fill in ((clean, 0.0), (dirty, value)):
        codes = torch.full_like(problem["h"][0, 37:].float(), fill).to(problem["h"].dtype)
        problem["h"][0, 37:] = codes
    plan = compiled(name)
    clean, dirty = run(plan, clean), run(plan, dirty)
    assert bool(dirty["out"][0, :37].isfinite().all())
    assert_same_bits(dirty["out"][0, :37], clean["out"][0, :37], "rows before the length")
    assert_same_bits(dirty["out"][1], clean["out"][1], "another entry")


@modes
def test_the_workspace_is_exact(name):
    """S28."""
    problem, plan = make(name, *("d256", *LARGEST)), compiled(name)
    expected = run(plan, problem)
    guarded = GuardedBuffer(plan.get_workspace_size(), CUDA)
    guarded.bytes.zero_()
    problem.execute(plan, workspace=guarded.bytes)
    torch.cuda.synchronize()
    assert guarded.is_intact()
    assert_same_bits(problem["out"], expected["out"], "out")


@pytest.mark.parametrize("name", [name for name in MODES if "output" not in name])
def test_new_scales_compile_nothing(name, monkeypatch):
    problem, plan = make(name), compiled(name)
    monkeypatch.setattr(KernelBuild, "__call__", None)
    quant = dataclasses.replace(problem.quant, scale_o=61.0)
    other = dataclasses.replace(problem, quant=quant)
    try:
        plan.update_quant_scales(quant)
        changed = run(plan, other)
    finally:
        plan.update_quant_scales(problem.quant)
    assert_matches(changed, other)
    assert not torch.equal(changed["out"], run(plan, problem)["out"])
