# SPDX-License-Identifier: Apache-2.0
"""Projection plans on the GPU at hand: each engine by name, and problems on guarded outputs."""

from __future__ import annotations

import functools
from typing import Any

import torch

from cudnn_blocks import GatedAttentionGeometry, Gemm, QkvGateProjection
from cudnn_blocks.target import Target
from tests.helpers.gemm_problem import GemmProblem, spec_gemm, spec_projection
from tests.helpers.tensors import guarded_copy

CUDA = torch.device("cuda", 0)
HAS_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability(0) == (9, 0)
"""A machine without a GPU collects what an H200 would run."""
ENGINES = ("hopper", "portable") if HAS_HOPPER else ("portable",)
SAMPLE_ROWS = (16, 64, 512, 32768)
"""Rows for which plans are made: each gets another tile."""
MAX_BATCH = 8


@functools.cache
def compiled_plan(
    engine: str,
    rows: int,
    sizes: tuple[int, int] | GatedAttentionGeometry,
    dtype: torch.dtype = torch.bfloat16,
) -> Gemm | QkvGateProjection:
    """A plan whose tile is that of ``rows`` rows, for any call of fewer; N, K or a geometry."""
    slot = "gemm" if isinstance(sizes, tuple) else "qkv_gate_proj_norm_rope"
    options: dict[str, Any] = {
        "dtype": dtype,
        "target": Target.of_device(CUDA).name,
        "engines": {slot: engine},
    }
    tokens = (MAX_BATCH, rows // MAX_BATCH)
    if isinstance(sizes, tuple):
        plan: Any = spec_gemm((*tokens, *sizes), **options)
    else:
        plan = spec_projection(sizes, tokens, **options)
    plan.compile()
    return plan


def run_guarded(problem: GemmProblem, plan: Gemm | QkvGateProjection, what: str) -> GemmProblem:
    """Runs the problem with its result between guards."""
    name = "y" if problem.geometry is None else "proj"
    copy, buffer = guarded_copy(problem.result)
    done = problem.with_(**{name: copy}).run(plan)
    torch.cuda.synchronize()
    assert buffer.is_intact(), f"{what}: written outside {name}"
    return done
