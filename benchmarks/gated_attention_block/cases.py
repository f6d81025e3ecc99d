# SPDX-License-Identifier: Apache-2.0
"""The attention layers of two models, op by op and whole, and what they have to show, as data.

``portable`` and ``cudnn`` are timed beside the default engine where the table says so.
"""

from __future__ import annotations

from benchmarks.gated_attention_block.block_problem import BlockProblem
from benchmarks.gated_attention_block.gemm_problem import GemmProblem
from benchmarks.gated_attention_block.pointwise_problem import GateProblem, NormRopeProblem
from benchmarks.gated_attention_block.sdpa_problem import SdpaProblem
from benchmarks.harness.goals import Goal
from cudnn_blocks import GatedAttentionGeometry

QWEN3_NEXT, QWEN35_397B = "qwen3-next", "qwen3.5-397b"
GEOMETRIES = {
    QWEN3_NEXT: GatedAttentionGeometry(2048, h_q=16, h_kv=2, d_head=256, rope_dim=64),
    QWEN35_397B: GatedAttentionGeometry(4096, h_q=32, h_kv=2, d_head=256, rope_dim=64),
}

TOKENS = (2048, 4096, 8192, 16384, 32768)
BLOCK_TOKENS = (2048, 4096, 8192, 32768)
POINTWISE_TOKENS = (2048, 8192, 32768)
HOST_TOKENS = 16
GEMM_ENGINES_AT = 4096
SDPA_ENGINES_AT = (2048, 8192)
"""Tokens at which our other engines are timed as well."""

SDPA_SIZES = ((16, 2, 256, True), (16, 2, 256, False), (32, 8, 128, True))
"""Query heads, key heads, channels, causal."""


def _gemms() -> tuple[GemmProblem, ...]:
    """In and out projection of both models."""
    return tuple(
        GemmProblem(n, k, tokens, of, has_every_engine=tokens == GEMM_ENGINES_AT)
        for one in GEOMETRIES.values()
        for n, k, of in ((one.n_qkvg, one.d_model, one), (one.d_model, one.attn_width, None))
        for tokens in TOKENS
    )


GEMM = _gemms()
SDPA = tuple(
    SdpaProblem(*sizes, tokens, has_every_engine=tokens in SDPA_ENGINES_AT)
    for sizes in SDPA_SIZES
    for tokens in TOKENS
)
_POINTWISE = (*((QWEN3_NEXT, tokens) for tokens in POINTWISE_TOKENS), (QWEN35_397B, 8192))
NORM_ROPE = tuple(NormRopeProblem(one, GEOMETRIES[one], tokens) for one, tokens in _POINTWISE)
GATE = tuple(GateProblem(one, GEOMETRIES[one], tokens) for one, tokens in _POINTWISE)
BLOCK = tuple(
    BlockProblem(model, geometry, tokens)
    for tokens in BLOCK_TOKENS
    for model, geometry in GEOMETRIES.items()
)
HOST = (BlockProblem(QWEN3_NEXT, GEOMETRIES[QWEN3_NEXT], HOST_TOKENS),)

_EAGER = {2048: 2.2, 4096: 1.35, 8192: 1.12, 32768: 1.10}
_GRAPH = {2048: 1.15, 4096: 1.15}
_PRODUCTS = tuple(dict.fromkeys(problem.name for problem in GEMM))

GOALS = (
    *(Goal(f"gemm/{name}/M*", 1.0, forgives_spread=True) for name in _PRODUCTS),
    Goal("gemm/*/norm-rope/*", 0.04, "overhead"),
    *(Goal(f"sdpa/d256-causal/S{tokens}", 1.10) for tokens in TOKENS if tokens >= 4096),
    Goal("sdpa/d256-full/S*", 1.05),
    Goal("sdpa/d128-causal/S*", 1.05),
    Goal("sdpa/d256-causal/S*", 1.0, forgives_spread=True),
    Goal("sdpa/*/gate/*", 0.05, "overhead"),
    *(Goal(f"block/{QWEN3_NEXT}/eager/S{tokens}", ratio) for tokens, ratio in _EAGER.items()),
    *(Goal(f"block/{QWEN3_NEXT}/graph/S{tokens}", ratio) for tokens, ratio in _GRAPH.items()),
    *(
        Goal(f"block/{model}/{mode}/S*", 0.0, "overhead", forgives_spread=True)
        for model in GEOMETRIES
        for mode in ("eager", "graph")
    ),
    *(
        Goal(f"pointwise/*/S{tokens}", 0.80, "share")
        for tokens in POINTWISE_TOKENS
        if tokens >= 8192
    ),
    Goal(f"host/{QWEN3_NEXT}/S*", 5.0, "launches"),
)
"""On an H200. The overhead of a block is that of its fused form over the unfused one."""
