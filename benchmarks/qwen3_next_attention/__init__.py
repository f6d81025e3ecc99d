# SPDX-License-Identifier: Apache-2.0
"""The full-attention layer of Qwen3-Next as transformers runs it, with and without acceleration."""

from __future__ import annotations

from benchmarks.harness.case import Bench
from benchmarks.harness.environment import TORCH_CUDNN
from benchmarks.harness.goals import Goal
from benchmarks.qwen3_next_attention.bench import LayerCase
from benchmarks.qwen3_next_attention.problem import LayerProblem

TOKENS = (2048, 8192)

BENCH = Bench(
    name="qwen3_next_attention",
    cases=tuple(LayerCase(LayerProblem(tokens)) for tokens in TOKENS),
    peer_distributions=("transformers", "torch", TORCH_CUDNN, "flash-attn", "kernels"),
    goals=(Goal("layer/*/graph/S8192", 1.5),),
)
