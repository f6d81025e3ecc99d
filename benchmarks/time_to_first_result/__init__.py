# SPDX-License-Identifier: Apache-2.0
"""From ``import cudnn_blocks`` to the first result in a fresh process: cold, from disk, bundled."""

from __future__ import annotations

from benchmarks.harness.case import Bench
from benchmarks.time_to_first_result import cases
from benchmarks.time_to_first_result.bench import FirstResultCase

BENCH = Bench(
    name="time_to_first_result",
    cases=tuple(FirstResultCase(name, shape, plan) for name, shape, plan in cases.CASES),
    peer_distributions=("torch", "apache-tvm-ffi"),
    goals=cases.GOALS,
)
