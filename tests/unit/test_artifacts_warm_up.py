# SPDX-License-Identifier: Apache-2.0
"""warm(): refuses what compile() refuses, lists each kernel once, and compiles in the end."""

from __future__ import annotations

import pytest
import torch

import cudnn_blocks
from cudnn_blocks import (
    CaptureError,
    CausalConv1dGeometry,
    CausalConv1dUpdate,
    ContractError,
    TensorSpec,
    api_base,
)
from cudnn_blocks.stages.kernel_cache import CompiledKernel, KernelCache
from tests.helpers.toy_op import make_toy


def test_on_the_cpu_it_is_compile():
    plan = make_toy()
    plan.warm(progress=False)
    assert plan._compiled
    others = [make_toy(), make_toy()]
    cudnn_blocks.warm(iter(others), progress=False)
    assert all(other._compiled for other in others)


def test_no_plans():
    cudnn_blocks.warm([])


@pytest.mark.parametrize("jobs", [0, -1, 1.5, True, "2"])
def test_jobs_are_a_positive_int(jobs):
    with pytest.raises(ContractError, match="jobs: expected a positive int or None"):
        cudnn_blocks.warm([make_toy()], jobs=jobs)


def test_plans_only():
    with pytest.raises(TypeError, match="plans: expected APIBase, got str"):
        cudnn_blocks.warm(["plan"])


def test_a_cold_plan_in_a_capture_is_refused_as_compile_refuses_it(monkeypatch):
    def spec(*shape):
        return TensorSpec.contiguous(shape, torch.bfloat16)

    monkeypatch.setattr(api_base, "is_capturing", lambda: True)
    plan = CausalConv1dUpdate(
        spec(1, 8), spec(1, 8, 4), spec(8, 4), spec(1, 8), CausalConv1dGeometry(8), target="sm_90a"
    )
    for refused in (plan.compile, plan.warm):
        with pytest.raises(CaptureError, match="not compiled .* call compile"):
            refused()


def test_a_plan_that_is_not_served_raises_as_compile_does():
    def spec(*shape):
        return TensorSpec.contiguous(shape, torch.bfloat16)

    plan = CausalConv1dUpdate(
        spec(1, 8), spec(1, 8, 9), spec(8, 9), spec(1, 8), CausalConv1dGeometry(8, 9, 9),
        target="sm_90a",
    )  # fmt: skip
    with pytest.raises(Exception, match="width") as of_compile:
        plan.compile()
    with pytest.raises(type(of_compile.value), match="width"):
        plan.warm()


def test_collecting_compiles_nothing_and_leaves_nothing():
    cache, compiled = KernelCache(), []

    def build():
        compiled.append(1)
        return CompiledKernel(None)

    there = cache.get("there", build)
    with cache.collecting() as wanted:
        assert cache.get("there", build) is there
        assert cache.get("a", build).call is None
        cache.get("a", build)
    assert list(wanted) == ["a"]
    assert len(compiled) == cache.stats().compiled == 1
    cache.get("a", wanted["a"])
    assert len(compiled) == 2
