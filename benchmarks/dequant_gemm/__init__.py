# SPDX-License-Identifier: Apache-2.0
"""Products with block-scaled weights against cuBLAS on the same weights in BF16."""

from __future__ import annotations

from benchmarks.dequant_gemm import cases
from benchmarks.dequant_gemm.bench import DequantGemmCase
from benchmarks.harness.case import Bench

BENCH = Bench(
    name="dequant_gemm",
    cases=tuple(DequantGemmCase(problem) for problem in cases.PROBLEMS),
    peer_distributions=("torch",),
    goals=cases.GOALS,
)
