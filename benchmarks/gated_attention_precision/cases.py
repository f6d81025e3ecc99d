# SPDX-License-Identifier: Apache-2.0
"""The attention layers of two models in every precision, and what they have to show, as data."""

from __future__ import annotations

from benchmarks.gated_attention_block.cases import GEOMETRIES, QWEN3_NEXT
from benchmarks.gated_attention_precision.block_problem import PrecisionBlockProblem
from benchmarks.gated_attention_precision.sdpa_problem import Fp8SdpaProblem
from benchmarks.harness.goals import Goal

FP8_FUSED, FP8, MXFP8 = "fp8-fused", "fp8", "mxfp8"
MXFP4_WEIGHTS, NVFP4_OUTPUT = "mxfp4-weights", "nvfp4-output"
TOKENS = {
    FP8_FUSED: (2048, 8192, 32768),
    FP8: (8192,),
    MXFP8: (32, 8192),
    MXFP4_WEIGHTS: (32, 8192),
    NVFP4_OUTPUT: (32, 8192),
}
"""32 is about the rows of a decode step: weights are most of its bytes."""
SDPA_TOKENS = (2048, 8192, 32768)

BLOCK = tuple(
    PrecisionBlockProblem(model, geometry, tokens, precision)
    for precision, every in TOKENS.items()
    for tokens in every
    for model, geometry in GEOMETRIES.items()
)
SDPA = tuple(Fp8SdpaProblem(16, 2, 256, True, tokens) for tokens in SDPA_TOKENS)
GOALS = (
    Goal(f"block/{QWEN3_NEXT}/{FP8_FUSED}/*/S8192", 1.4),
    Goal("sdpa/d256-causal/S*", 1.0),
)
"""On an H200: the fused FP8 block over our fused BF16 block, FP8 attention over that of FA3."""
