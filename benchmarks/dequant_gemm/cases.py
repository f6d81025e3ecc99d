# SPDX-License-Identifier: Apache-2.0
"""Projections of gated attention layers with coded weights, as data.

9216x2048 and 2048x4096 are the two projections of Qwen3-Next, 17408x4096 the larger one of the 397B
model; a row is a token of decoding, or of a prefill of thousands.
"""

from __future__ import annotations

from benchmarks.dequant_gemm.problem import DequantGemmProblem
from benchmarks.harness.goals import Goal

SIZES = ((9216, 2048), (2048, 4096), (17408, 4096))
FEW, MANY = (1, 8, 16, 32, 64), (4096, 16384)
PROBLEMS = tuple(
    DequantGemmProblem(fmt, n, k, rows)
    for n, k in SIZES
    for fmt in ("mxfp4", "nvfp4", "mxfp8")
    for rows in (*FEW, *MANY)
    if fmt != "mxfp8" or n == SIZES[0][0]
)

GOALS = (
    *(Goal(f"gemm/*fp4-9216x2048/M{rows}", 2.0) for rows in FEW[:-1]),
    *(Goal(f"gemm/*fp4-9216x2048/M{rows}", 0.85) for rows in MANY),
)
"""Of cuBLAS in BF16, on an H200."""
