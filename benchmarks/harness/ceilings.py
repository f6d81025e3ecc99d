# SPDX-License-Identifier: Apache-2.0
"""The device's own ceilings, measured in the run that uses them."""

from __future__ import annotations

import torch

from benchmarks.harness.statistics import summarise

COPY_BYTES = 1 << 30
COPY_ROUNDS = 15


def copy_bandwidth_gb_s() -> float:
    """Device copy of 1 GiB of random data, bytes read plus bytes written, median, in GB/s."""
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times_us = []
    for _ in range(COPY_ROUNDS):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times_us.append(start.elapsed_time(end) * 1e3)
    return 2 * COPY_BYTES / (summarise(times_us).median_us * 1e3)
