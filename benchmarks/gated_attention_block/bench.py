# SPDX-License-Identifier: Apache-2.0
"""How each kind of case of the block is measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from benchmarks.gated_attention_block import ours, peers
from benchmarks.gated_attention_block.gemm_problem import NORM_ROPE
from benchmarks.gated_attention_block.ours import CUDNN, PORTABLE, UNFUSED
from benchmarks.gated_attention_block.sampled import SampledCase
from benchmarks.gated_attention_block.sdpa_problem import GATE
from benchmarks.harness.arm import Offer, offer, own
from benchmarks.harness.measure import measure_host
from benchmarks.harness.trivial import TRIVIAL, trivial_arm
from cudnn_blocks.target import Target

if TYPE_CHECKING:
    from benchmarks.gated_attention_block.block_problem import BlockProblem
    from benchmarks.gated_attention_block.gemm_problem import GemmProblem
    from benchmarks.gated_attention_block.pointwise_problem import GateProblem, NormRopeProblem
    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.gated_attention_block.sdpa_problem import SdpaProblem
    from benchmarks.harness.case import Lab, Outcome
    from benchmarks.harness.timing import GraphTimer

HOST_CALLS = 150
"""Calls between two syncs: the launch queue holds all their kernels, five a call."""


class GemmCase(SampledCase):
    """A product against cuBLAS; the epilogue of the fused projection against the plain product."""

    family = "gemm"
    kinds = (family, "latency")
    base_variant = ""

    def __init__(self, problem: GemmProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem
        self.variants = ("",) if problem.geometry is None else ("", NORM_ROPE)

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        found: list[Offer] = [peers.cublas()]
        for variant in self.variants:
            build = partial(ours.gemm_op, self.problem, sets[0], variant)
            found += ours.engine_arms(build, variant, self.device, self._others(variant))
        return found

    def _others(self, variant: str) -> tuple[str, ...]:
        if not self.problem.has_every_engine:
            return ()
        return (PORTABLE,) if variant == NORM_ROPE else (PORTABLE, CUDNN)

    @override
    def plans(self) -> Sequence[Any]:
        sample, target = self.problem.make_set("meta"), _target()
        return [
            ours.gemm_op(self.problem, sample, variant, engine, target).plan
            for variant in self.variants
            for engine in (None, *self._others(variant))
            if engine != CUDNN
        ]


class SdpaCase(SampledCase):
    """Attention against the other ones, and its gate against the plain form."""

    family = "sdpa"
    kinds = (family, "latency")
    base_variant = ""
    has_equal_bursts = True
    VARIANTS = ("", GATE)

    def __init__(self, problem: SdpaProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem
        self._others = (PORTABLE,) if problem.has_every_engine else ()

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        found: list[Offer] = []
        for variant in self.VARIANTS:
            build = partial(ours.sdpa_op, self.problem, sets[0], variant)
            found += ours.engine_arms(build, variant, self.device, self._others)
        return [*found, *peers.attention_peers(self.problem, sets[0], self.device)]

    @override
    def plans(self) -> Sequence[Any]:
        sample, target = self.problem.make_set("meta"), _target()
        return [
            ours.sdpa_op(self.problem, sample, variant, engine, target).plan
            for variant in self.VARIANTS
            for engine in (None, *self._others)
        ]


class NormRopeCase(SampledCase):
    """Norm and RoPE against torch; the share of the copy bandwidth is what counts."""

    family = "pointwise"
    kinds = (family, "latency")

    def __init__(self, problem: NormRopeProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        build = partial(ours.norm_rope_op, self.problem, sets[0])
        return [
            own(ours.OURS, lambda: ours.arm_of(build())),
            *peers.norm_rope_peers(self.problem, self.device),
        ]

    @override
    def plans(self) -> Sequence[Any]:
        return [ours.norm_rope_op(self.problem, self.problem.make_set("meta"), _target()).plan]


class GateCase(SampledCase):
    """The gate against torch; the share of the copy bandwidth is what counts."""

    family = "pointwise"
    kinds = (family, "latency")

    def __init__(self, problem: GateProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        build = partial(ours.gate_op, self.problem, sets[0])
        return [
            own(ours.OURS, lambda: ours.arm_of(build())),
            *peers.gate_peers(self.problem, self.device),
        ]

    @override
    def plans(self) -> Sequence[Any]:
        return [ours.gate_op(self.problem, self.problem.make_set("meta"), _target()).plan]


class BlockCase(SampledCase):
    """The fused block against chains, with the unfused one beside it; eager and as a graph."""

    family = "block"
    kinds = (family, "latency")
    modes = ("eager", "graph")
    base_variant = UNFUSED
    has_equal_bursts = True
    VARIANTS = ("", UNFUSED)

    def __init__(self, problem: BlockProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        return [*self._ours(sets[0]), *peers.chain_peers(self.problem, sets[0], self.device)]

    def _ours(self, sample: Tensors) -> list[Offer]:
        return [
            own(ours.OURS, partial(ours.block_arm, self.problem, sample, variant), variant)
            for variant in self.VARIANTS
        ]

    @override
    def plans(self) -> Sequence[Any]:
        sample, target = self.problem.make_set("meta"), _target()
        return [ours.block_plan(self.problem, sample, variant, target) for variant in self.VARIANTS]


class HostCase(BlockCase):
    """Microseconds per eager call of the block, beside a trivial TVM-FFI launch."""

    kinds = ("host",)
    modes = ("eager",)
    VARIANTS = ("", UNFUSED)

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        return [offer(TRIVIAL, trivial_arm), *self._ours(sets[0])]

    @override
    def _measure(self, lab: Lab) -> Outcome:
        return measure_host(self, lab, trivial=TRIVIAL, calls_per_round=HOST_CALLS)


def _target() -> Target:
    """The GPU at hand."""
    return Target.of_device(torch.device("cuda", torch.cuda.current_device()))
