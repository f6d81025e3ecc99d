# SPDX-License-Identifier: Apache-2.0
"""The device's own ceilings, measured in the run that uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.harness.statistics import summarise

if TYPE_CHECKING:
    from collections.abc import Callable

COPY_BYTES = 1 << 30
MATMUL_SIZE = 8192
ROUNDS = 15


def copy_bandwidth_gb_s() -> float:
    """Device copy of 1 GiB of random data, bytes read plus bytes written, median, in GB/s."""
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (_median_us(lambda: target.copy_(source)) * 1e3)


def matmul_tflop_s() -> float:
    """BF16 matrix product of 8192 x 8192 random operands, median, in TFLOP/s."""
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    return 2 * MATMUL_SIZE**3 / (_median_us(lambda: torch.mm(a, b, out=out)) * 1e6)


def _median_us(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times_us = []
    for _ in range(ROUNDS):
        start.record()
        work()
        end.record()
        end.synchronize()
        times_us.append(start.elapsed_time(end) * 1e3)
    return summarise(times_us).median_us
