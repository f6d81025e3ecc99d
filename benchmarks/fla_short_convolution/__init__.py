# SPDX-License-Identifier: Apache-2.0
"""The short convolutions of a 36-layer decode step through FLA's modules, with and without ours."""

from __future__ import annotations

from benchmarks.fla_short_convolution.bench import DeviceCase, HostCase
from benchmarks.fla_short_convolution.problem import DecodeProblem
from benchmarks.harness.case import Bench
from benchmarks.harness.goals import Goal

ROWS = (1, 32, 256)
PROBLEMS = tuple(DecodeProblem(rows) for rows in ROWS)

BENCH = Bench(
    name="fla_short_convolution",
    cases=(
        *(HostCase(problem) for problem in PROBLEMS),
        *(DeviceCase(problem) for problem in PROBLEMS),
    ),
    peer_distributions=("fla-core", "flash-linear-attention", "triton", "torch"),
    goals=(
        Goal("host/decode/*", 3.0),
        Goal("step/decode/*", 1.0, forgives_spread=True),
    ),
)
