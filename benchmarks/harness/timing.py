# SPDX-License-Identifier: Apache-2.0
"""Device time of CUDA graphs: arms interleaved by round, the L2 flushed before each measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from benchmarks.harness.statistics import shuffles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.harness.arm import Launch

TARGET_US = 10_000.0
"""Device time one measurement aims at."""
MAX_REPLAYS = 400
LEAD_US = 50_000.0
"""Device time of a lead-in: longer than the GPU takes to settle at its power limit."""


class Replayable(Protocol):
    """A CUDA graph, or what stands for one."""

    def replay(self) -> None:
        """Launches everything once."""


@dataclass(frozen=True)
class EagerCalls:
    """Calls one after the other, as a program without graphs makes them."""

    launches: tuple[Launch, ...]

    def replay(self) -> None:
        """Launches everything once."""
        for launch in self.launches:
            launch()


@dataclass(frozen=True)
class CapturedArm:
    """One graph that launches an arm once on each buffer set, or calls that do."""

    graph: Replayable
    launches: tuple[Launch, ...]
    """One per buffer set. They own tensors that the graph reads and nothing else holds."""

    @property
    def count(self) -> int:
        """Launches in the graph."""
        return len(self.launches)


def capture(launches: Sequence[Launch]) -> CapturedArm:
    """Captures one launch per buffer set; outputs that an arm allocates stay distinct."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [launch() for launch in launches]
    del outputs
    graph.replay()
    torch.cuda.synchronize()
    return CapturedArm(graph, tuple(launches))


def eager(launches: Sequence[Launch]) -> CapturedArm:
    """The same calls without a graph, after a first round of them."""
    calls = EagerCalls(tuple(launches))
    calls.replay()
    torch.cuda.synchronize()
    return CapturedArm(calls, calls.launches)


class GraphTimer:
    """Times captured arms against each other on the current device.

    Args:
        l2_bytes: the device's L2; four times as much is overwritten before each measurement.
    """

    def __init__(self, l2_bytes: int) -> None:
        self._flush = torch.empty(4 * l2_bytes, dtype=torch.uint8, device="cuda")
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def measure_us(self, arm: CapturedArm, replays: int) -> float:
        """Microseconds per launch over back-to-back replays of the graph."""
        self._flush.zero_()
        self._start.record()
        for _ in range(replays):
            arm.graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e3 / (replays * arm.count)

    def lead_in(self, arm: CapturedArm, replays: int) -> None:
        """The same, untimed."""
        for _ in range(replays):
            arm.graph.replay()

    def pilot_us(self, arm: CapturedArm) -> float:
        """A first estimate: the faster of two short measurements."""
        return min(self.measure_us(arm, 2) for _ in range(2))

    def interleaved_us(
        self,
        arms: Mapping[str, CapturedArm],
        pilots_us: Mapping[str, float],
        rounds: int,
        *,
        leads_us: Mapping[str, float] | None = None,
    ) -> dict[str, list[float]]:
        """Every arm once a round, in another order each time; one list of rounds per arm.

        With ``leads_us``, the time of a launch of each, an arm runs untimed before it is measured,
        so that clocks are its own and not those that its neighbour in the round left behind.
        """
        replays = {key: replays_for(pilots_us[key] * arm.count) for key, arm in arms.items()}
        times: dict[str, list[float]] = {key: [] for key in arms}
        for order in shuffles(list(arms), rounds):
            for key in order:
                if leads_us is not None:
                    graph_us = leads_us[key] * arms[key].count
                    self.lead_in(arms[key], math.ceil(LEAD_US / graph_us))
                times[key].append(self.measure_us(arms[key], replays[key]))
        return times


def replays_for(graph_us: float) -> int:
    """Replays that make a measurement about 20 ms long."""
    return max(1, min(MAX_REPLAYS, math.ceil(TARGET_US / graph_us)))
