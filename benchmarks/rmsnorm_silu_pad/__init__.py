# SPDX-License-Identifier: Apache-2.0
"""Bias, residual, norm, SiLU and padding on an existing activation, against torch."""

from __future__ import annotations

from benchmarks.harness.case import Bench
from benchmarks.rmsnorm_silu_pad import cases
from benchmarks.rmsnorm_silu_pad.bench import NormCase

BENCH = Bench(
    name="rmsnorm_silu_pad",
    cases=tuple(NormCase(problem) for problem in cases.PROBLEMS),
    peer_distributions=("torch", "triton"),
    goals=cases.GOALS,
)
