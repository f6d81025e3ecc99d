# SPDX-License-Identifier: Apache-2.0
"""Products with block-scaled weights against cuBLAS on the same weights in BF16, and against quack.

``weight-only/`` has quack's product of the same codes. Bytes of weights and of the workspace that a
caller hands over stand beside the engine of every arm.
"""

from __future__ import annotations

from benchmarks.dequant_gemm import cases
from benchmarks.dequant_gemm.bench import DequantGemmCase
from benchmarks.harness.case import Bench

BENCH = Bench(
    name="dequant_gemm",
    cases=tuple(DequantGemmCase(problem) for problem in cases.PROBLEMS),
    peer_distributions=("torch", "quack-kernels"),
    goals=cases.GOALS,
)
