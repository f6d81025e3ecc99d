# SPDX-License-Identifier: Apache-2.0
"""How a case of the norm is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from benchmarks.harness.arm import Offer, own
from benchmarks.harness.outputs import OutputsCase
from benchmarks.rmsnorm_silu_pad import ours, peers
from cudnn_blocks.target import Target

if TYPE_CHECKING:
    from benchmarks.harness.timing import GraphTimer
    from benchmarks.rmsnorm_silu_pad.problem import NormProblem, Tensors


class NormCase(OutputsCase):
    """The norm against torch; its share of the copy bandwidth is what counts."""

    kinds = ("kernel", "latency")

    def __init__(self, problem: NormProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        sample = sets[0]
        return [
            own("ours", lambda: ours.norm_arm(sample)),
            *peers.norm_peers(self.problem, self.device),
        ]

    @override
    def plans(self) -> Sequence[Any]:
        target = Target.of_device(torch.device("cuda", torch.cuda.current_device()))
        return [ours.norm_plan(self.problem.make_set("meta"), target)]
