# SPDX-License-Identifier: Apache-2.0
"""How the decode step is measured: host time of eager calls, device time of a graph."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from benchmarks.fla_short_convolution.problem import expected
from benchmarks.harness.arm import Arm, Launch, Offer, Role, offer, own
from benchmarks.harness.checks import PEER, close
from benchmarks.harness.measure import measure_host
from benchmarks.harness.package_case import PackageCase
from benchmarks.harness.trivial import TRIVIAL, trivial_arm
from cudnn_blocks.integrations.flash_linear_attention import accelerate_short_convolutions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.fla_short_convolution.problem import Buffers, DecodeProblem
    from benchmarks.harness.case import Lab, Outcome
    from benchmarks.harness.timing import GraphTimer

STEPS_PER_ROUND = 20
"""Eager steps between two syncs: 36 launches each have to fit the launch queue."""


class DeviceCase(PackageCase):
    """Steps inside a CUDA graph."""

    family = "step"
    kinds = (family, "latency")
    package = "fla.modules.causal_conv1d"

    def __init__(self, problem: DecodeProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Buffers], timer: GraphTimer | None) -> list[Offer]:
        del timer
        return [
            own("ours", lambda: _our_arm(sets[0])),
            Arm("fla", Role.PEER, "triton", lambda buffers: _step(buffers["convs"], buffers)),
        ]

    @override
    def check(self, arm: Arm) -> str | None:
        buffers = self.problem.make_set(self.device)
        outputs, caches = expected(buffers)
        actual = arm.bind(buffers)()
        for i, (out, cache) in enumerate(zip(outputs, caches, strict=True)):
            if not torch.equal(buffers["caches"][i], cache):
                return f"layer {i}: the cache is not the shifted one"
            wrong = close(actual[i], out, PEER, f"layer {i}")
            if wrong:
                return wrong
        return None


class HostCase(DeviceCase):
    """Host microseconds of a step of every layer, beside one trivial launch."""

    kinds = ("host",)

    @override
    def offers(self, sets: Sequence[Buffers], timer: GraphTimer | None) -> list[Offer]:
        return [offer(TRIVIAL, trivial_arm), *super().offers(sets, timer)]

    @override
    def _measure(self, lab: Lab) -> Outcome:
        return measure_host(self, lab, trivial=TRIVIAL, calls_per_round=STEPS_PER_ROUND)


def _step(convs: torch.nn.ModuleList, buffers: Buffers) -> Launch:
    pairs = list(zip(convs, buffers["inputs"], buffers["caches"], strict=True))

    def step() -> list[torch.Tensor]:
        return [conv(x, cache=cache, output_final_state=True)[0] for conv, x, cache in pairs]

    return step


def _our_arm(sample: Buffers) -> Arm:
    def bind(buffers: Buffers) -> Launch:
        convs = copy.deepcopy(buffers["convs"])
        acceleration = accelerate_short_convolutions(convs)
        _step(convs, buffers | {"caches": [cache.clone() for cache in buffers["caches"]]})()
        if acceleration.stats().original:
            raise AssertionError(f"the original ran: {acceleration.stats()}")
        return _step(convs, buffers)

    rows = accelerate_short_convolutions(copy.deepcopy(sample["convs"])).explain().rows
    return Arm("ours", Role.OURS, rows[0].engine, bind, description=f"{len(rows)} {rows[0].runs}")
