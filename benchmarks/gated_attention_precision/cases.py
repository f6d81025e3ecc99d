# SPDX-License-Identifier: Apache-2.0
"""The attention layers of two models in every precision, and what they have to show, as data."""

from __future__ import annotations

from benchmarks.gated_attention_block.cases import GEOMETRIES, QWEN3_NEXT
from benchmarks.gated_attention_precision.block_problem import PrecisionBlockProblem
from benchmarks.gated_attention_precision.gemm_problem import FAST, PROMOTED, Fp8GemmProblem
from benchmarks.gated_attention_precision.ours import OURS_FAST
from benchmarks.gated_attention_precision.quantize_problem import QuantizeProblem
from benchmarks.gated_attention_precision.sdpa_problem import Fp8SdpaProblem
from benchmarks.harness.goals import Goal

FP8_FUSED, FP8, MXFP8 = "fp8-fused", "fp8", "mxfp8"
FP8_FUSED_FAST = "fp8-fused-fast"
MXFP4_WEIGHTS, NVFP4_OUTPUT = "mxfp4-weights", "nvfp4-output"
MXFP8_FUSED, NVFP4_OUTPUT_FUSED = "mxfp8-fused", "nvfp4-output-fused"
TOKENS = {
    FP8_FUSED: (2048, 8192, 32768),
    FP8_FUSED_FAST: (8192,),
    FP8: (8192,),
    MXFP8: (32, 8192),
    MXFP4_WEIGHTS: (32, 8192),
    NVFP4_OUTPUT: (32, 8192),
    MXFP8_FUSED: (8192,),
    NVFP4_OUTPUT_FUSED: (8192,),
}
"""32 is about the rows of a decode step: weights are most of its bytes."""
SDPA_TOKENS = GEMM_TOKENS = (2048, 8192, 32768)
QUANTIZE_TOKENS = (8192, 32768)

BLOCK = tuple(
    PrecisionBlockProblem(model, geometry, tokens, precision)
    for precision, every in TOKENS.items()
    for tokens in every
    for model, geometry in GEOMETRIES.items()
)
GEMM = tuple(
    Fp8GemmProblem(n, k, tokens)
    for one in GEOMETRIES.values()
    for n, k in ((one.n_qkvg, one.d_model), (one.d_model, one.attn_width))
    for tokens in GEMM_TOKENS
)
QUANTIZE = tuple(
    QuantizeProblem(fmt, tokens, along_tokens=along_tokens)
    for fmt, along_tokens in (("fp8", False), ("mxfp8", False), ("mxfp8", True), ("nvfp4", False))
    for tokens in QUANTIZE_TOKENS
)
SDPA = tuple(Fp8SdpaProblem(16, 2, 256, True, tokens) for tokens in SDPA_TOKENS)
GOALS = (
    Goal(f"block/{QWEN3_NEXT}/{FP8_FUSED}/*/S8192", 1.4),
    Goal("gemm/*[0-9]/M*", 0.97),
    Goal(f"gemm/*/{PROMOTED}/M*", 0.97),
    Goal(f"gemm/*/{FAST}/M*", 0.97, arm=OURS_FAST),
    Goal("sdpa/d256-causal/S*", 1.0),
)
"""On an H200: the fused FP8 block over our fused BF16 block, accurate FP8 products over the faster
of ``torch._scaled_mm``'s two and over its accurate one, fast ones over its fast one, FP8 attention
over that of FA3."""
