# SPDX-License-Identifier: Apache-2.0
"""How each kind of case of the convolutions is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from benchmarks.conv3d import ours, peers
from benchmarks.harness.arm import Arm, Offer, Role, own
from benchmarks.harness.outputs import OutputsCase
from cudnn_blocks.target import Target

if TYPE_CHECKING:
    from benchmarks.conv3d.causal_problem import CausalProblem
    from benchmarks.conv3d.problem import Conv3dProblem, Tensors
    from benchmarks.harness.timing import GraphTimer


class BareCase(OutputsCase):
    """The convolution alone against cuDNN."""

    family = "bare"
    kinds = (family, "latency")

    def __init__(self, problem: Conv3dProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        return [*self._ours(sets[0]), *self._peers(sets[0])]

    def _ours(self, sample: Tensors) -> list[Arm]:
        build = partial(ours.conv3d_arm, self.problem)
        return ours.arms(build, sample, self.device, every=self.problem.has_every_engine)

    def _peers(self, sample: Tensors) -> list[Offer]:
        return [peers.conv_alone(sample, self.device)]

    @override
    def plans(self) -> Sequence[Any]:
        return _ahead(
            self.problem,
            lambda sample, engine, target: ours.conv3d_plans(
                self.problem, sample, engine, target=target
            ),
        )


class FusedCase(BareCase):
    """Convolution, bias, residual, norm, SiLU and padding against torch.compile of the same."""

    family = "fused"
    kinds = (family, "latency")

    @override
    def _ours(self, sample: Tensors) -> list[Arm]:
        found = super()._ours(sample)
        if not (self.problem.history_frames and self.problem.is_one_op):
            return found
        best = ours.engines_of(self.device, every=False)[0]
        alone = ours.Engine(best.name, "ours-op-alone", Role.YARDSTICK)
        build = partial(ours.conv3d_arm, self.problem, sample, alone, copies_history=False)
        return [*found, own(alone.arm, build)]

    @override
    def _peers(self, sample: Tensors) -> list[Offer]:
        return peers.fused_peers(self.problem, sample, self.device)


class HintCase(BareCase):
    """What it saves to name the planes that are zero: the call without the hint is the peer."""

    family = "hint"
    kinds = (family, "latency")
    UNHINTED = "ours-without-hint"

    @override
    def _ours(self, sample: Tensors) -> list[Arm]:
        build = partial(ours.conv3d_arm, self.problem, hinted=True)
        return ours.arms(build, sample, self.device, every=False)

    @override
    def _peers(self, sample: Tensors) -> list[Offer]:
        best = ours.engines_of(self.device, every=False)[0]
        unhinted = ours.Engine(best.name, self.UNHINTED, Role.PEER)
        return [own(unhinted.arm, partial(ours.conv3d_arm, self.problem, sample, unhinted))]

    @override
    def plans(self) -> Sequence[Any]:
        return _ahead(
            self.problem,
            lambda sample, engine, target: (
                plan
                for hinted in (False, True)
                for plan in ours.conv3d_plans(
                    self.problem, sample, engine, hinted=hinted, target=target
                )
            ),
        )


class CausalCase(OutputsCase):
    """The streaming first layer, packing included, against cuDNN on input packed beforehand."""

    family = "causal"
    kinds = (family, "latency")

    def __init__(self, problem: CausalProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        every = self.problem.has_every_engine
        return [
            *ours.arms(ours.causal_arm, sets[0], self.device, every=every),
            *peers.causal_peers(self.problem, sets[0], self.device),
        ]

    @override
    def plans(self) -> Sequence[Any]:
        return _ahead(
            self.problem,
            lambda sample, engine, target: (ours.causal_plan(sample, engine, target),),
        )


def _ahead(
    problem: Conv3dProblem | CausalProblem,
    plans: Callable[[Tensors, str, Target], Any],
) -> list[Any]:
    """Plans for the GPU at hand over meta samples, for every engine that the case times."""
    target = Target.of_device(torch.device("cuda", torch.cuda.current_device()))
    sample = problem.make_set("meta")
    engines = ours.engines_of("cuda", every=problem.has_every_engine)
    return [plan for engine in engines for plan in plans(sample, engine.name, target)]
