# SPDX-License-Identifier: Apache-2.0
"""Host time per eager call, arms interleaved round by round."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

from benchmarks.harness.statistics import shuffles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.harness.arm import Launch

MAX_CALLS_BETWEEN_SYNCS = 1000
"""The launch queue holds about 1024 entries; a longer run would time the device, not the host."""


def host_us(call: Launch, synchronize: Callable[[], None], calls: int) -> float:
    """Microseconds of host time per call; the device drains before and after, off the clock."""
    if not 1 <= calls <= MAX_CALLS_BETWEEN_SYNCS:
        raise ValueError(
            f"expected 1 to {MAX_CALLS_BETWEEN_SYNCS} calls between syncs, got {calls}"
        )
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    elapsed = time.perf_counter() - start
    synchronize()
    return elapsed * 1e6 / calls


def interleaved_host_us(
    calls: Mapping[str, Launch], synchronize: Callable[[], None], rounds: int, calls_per_round: int
) -> dict[str, list[float]]:
    """Every arm once a round, each in another order, warmed up, garbage collection off."""
    times: dict[str, list[float]] = {key: [] for key in calls}
    for call in calls.values():
        host_us(call, synchronize, max(1, calls_per_round // 10))
    gc.collect()
    gc.disable()
    try:
        for order in shuffles(list(calls), rounds):
            for key in order:
                times[key].append(host_us(calls[key], synchronize, calls_per_round))
    finally:
        gc.enable()
    return times
