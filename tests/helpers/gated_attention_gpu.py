# SPDX-License-Identifier: Apache-2.0
"""The block on the GPU at hand: few geometries, so that few kernels are compiled, used by all."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

import torch

from cudnn_blocks import GatedAttentionBlockFwd, GatedAttentionGeometry, TensorSpec
from cudnn_blocks.reference.gated_attention import gated_attention
from cudnn_blocks.stages.attention.stage import SdpaStage
from cudnn_blocks.stages.gemm.stage import GemmStage
from tests.helpers.gated_attention_problem import READ, GatedProblem, assert_close, make_problem

CUDA = torch.device("cuda", 0)
HAS_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability(0) == (9, 0)
"""A machine without a GPU collects what an H200 would run."""
KERNELS = ("hopper", "portable") if HAS_HOPPER else ("portable",)
CUDNN = "cudnn"
HAS_CUDNN = importlib.util.find_spec("cudnn") is not None
CUDNN_STAGES = tuple(
    slot
    for slot, stage in (("qkv_gate_proj", GemmStage), ("sdpa", SdpaStage), ("out_proj", GemmStage))
    if any(row.engine == CUDNN for row in stage.rows)
)
"""Slots that have such an engine."""
LARGEST = (3, 1024)
"""B and S of the samples."""
GEOMETRIES = {
    "d64": (GatedAttentionGeometry(256, 4, 4, 64, rope_dim=16), torch.bfloat16),
    "d128": (GatedAttentionGeometry(512, 6, 2, 128, rope_dim=128, window_left=200), torch.float16),
    "d256": (GatedAttentionGeometry(512, 4, 2, 256, rope_dim=64), torch.bfloat16),
    "d256-fp16": (
        GatedAttentionGeometry(512, 8, 1, 256, rope_dim=64, causal_bottom_right=True),
        torch.float16,
    ),
}


def problem_of(
    name: str, batch: int, tokens: int, device: torch.device = CUDA, **options: Any
) -> GatedProblem:
    """With lengths and LSE, always, so that one kernel serves every test."""
    geometry, dtype = GEOMETRIES[name]
    options = {"seq_lens": [tokens] * batch, "has_lse": True, **options}
    return make_problem(geometry, batch, tokens, dtype=dtype, device=device, **options)


def compiled_block(
    name: str,
    engines: Mapping[str, str] | str | None = None,
    device: torch.device = CUDA,
    **knobs: Any,
) -> GatedAttentionBlockFwd:
    """A compiled plan for ``LARGEST``; a single engine's name pins every stage that has it."""
    pins = tuple(sorted(engines.items())) if isinstance(engines, Mapping) else engines
    return _block(name, pins, device, tuple(sorted(knobs.items())))


@functools.cache
def _block(
    name: str, pins: Any, device: torch.device, knobs: tuple[tuple[str, bool], ...]
) -> GatedAttentionBlockFwd:
    geometry, dtype = GEOMETRIES[name]
    (batch, tokens), d_model = LARGEST, geometry.d_model

    def spec(*shape: int) -> TensorSpec:
        return TensorSpec.contiguous(shape, dtype, device)

    def build(engines: Mapping[str, str] | None) -> GatedAttentionBlockFwd:
        hidden, norm = spec(batch, tokens, d_model), spec(geometry.d_head)
        table = spec(batch, tokens, geometry.rope_dim)
        return GatedAttentionBlockFwd(
            hidden,
            spec(geometry.n_qkvg, d_model),
            norm,
            norm,
            table,
            table,
            spec(d_model, geometry.attn_width),
            hidden,
            geometry,
            return_lse=True,
            seq_lens_present=True,
            engines=engines,
            **dict(knobs),
        )

    if isinstance(pins, str):
        stages = build(None).probe().stages
        pins = tuple(
            (one.stage, pins)
            for one in stages
            if any(row.engine == pins and row.served for row in one.engines)
        )
    plan = build(None if pins is None else dict(pins))
    plan.compile()
    return plan


def run(plan: GatedAttentionBlockFwd, problem: GatedProblem, **extra: Any) -> GatedProblem:
    """One call on outputs and a workspace of its own, which must not be needed afterwards."""
    return problem.clone().execute(plan, **extra)


def expected(problem: GatedProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's out and LSE, in FP32 on the GPU."""
    return gated_attention(
        *(problem.operands[name] for name in READ),
        problem.geometry,
        seq_lens=problem.operands["seq_lens"],
        fuse_norm_rope=problem.knobs.get("fuse_norm_rope", False),
    )


def assert_matches(actual: GatedProblem, problem: GatedProblem, what: str = "") -> None:
    """Out and LSE a few roundings from the reference; rows without a key exactly so."""
    out, lse = expected(problem)
    dead = lse == -torch.inf
    assert torch.equal(actual["lse"] == -torch.inf, dead), f"{what} lse: other rows see no key"
    rows = dead.all(1)
    assert bool((actual["out"][rows] == 0).all()), f"{what} out: a row without a key is not 0"
    if bool((~rows).any()):
        assert_close(actual["out"][~rows], out[~rows], f"{what} out")
    live = ~dead
    error = (actual["lse"][live] - lse[live]).abs()
    limit = 32 * torch.finfo(actual["out"].dtype).eps
    assert bool((error <= limit).all()), f"{what} lse: off by {error.max().item()}"
