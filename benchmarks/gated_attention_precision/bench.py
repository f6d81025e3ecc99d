# SPDX-License-Identifier: Apache-2.0
"""How the precision modes of the block and their stages are measured."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from benchmarks.gated_attention_block.ours import OURS
from benchmarks.gated_attention_block.peers import COMPILED
from benchmarks.gated_attention_block.sampled import SampledCase
from benchmarks.gated_attention_precision import ours, peers
from benchmarks.gated_attention_precision.gemm_problem import FAST, PROMOTED
from benchmarks.harness.arm import Arm, Missing, Offer, Role, offer, own
from benchmarks.harness.inductor import NO_GPU
from benchmarks.harness.problem_case import ProblemCase
from cudnn_blocks.target import Target

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.gated_attention_precision.block_problem import PrecisionBlockProblem
    from benchmarks.gated_attention_precision.gemm_problem import Fp8GemmProblem
    from benchmarks.gated_attention_precision.quantize_problem import QuantizeProblem
    from benchmarks.gated_attention_precision.sdpa_problem import Fp8SdpaProblem
    from benchmarks.harness.timing import GraphTimer

PEER_BYTES_OFF = 1e-3
"""Share of a result's bytes in which a peer may differ: Inductor's divisions are not exact."""


class QuantizeCase(ProblemCase):
    """Codes and scales, compared bit by bit; the share of the copy bandwidth is what counts."""

    family = "quantize"
    kinds = (family, "latency")

    def __init__(self, problem: QuantizeProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        arm = own(OURS, partial(ours.quantize_arm, self.problem, sets[0]))
        if self.device == "cpu":
            return [arm, Missing(COMPILED, NO_GPU)]
        return [arm, offer(COMPILED, partial(peers.compiled_quantizer, self.problem))]

    @override
    def check(self, arm: Arm) -> str | None:
        """On data of its own: the reference of two arms is worked out twice."""
        buffers, wanted = self.problem.make_set(self.device), self.problem.results(self.device)
        self.problem.quantize(buffers["x"], wanted)
        arm.bind(buffers)()
        for name, expected in wanted.items():
            off = buffers[name].view(torch.uint8) != expected.view(torch.uint8)
            allowed = PEER_BYTES_OFF * off.numel() if arm.role is Role.PEER else 0
            if int(off.sum()) > allowed:
                return f"{name}: {int(off.sum())} of {off.numel()} bytes differ"
        return None

    @override
    def plans(self) -> Sequence[Any]:
        return [ours.quantize_plan(self.problem, self.problem.make_set("meta"), _target())]


class Fp8GemmCase(SampledCase):
    """A product of codes against cuBLAS's: the accurate default against both, then like and like.

    Every variant is timed with arms of its own, so the same product may be in two of them.
    """

    family = "gemm"
    kinds = (family, "latency")
    variants: Mapping[str, tuple[str, tuple[str, ...]]] = {
        "": (OURS, tuple(peers.SCALED_MM)),
        PROMOTED: (OURS, (peers.SCALED_MM_PROMOTED,)),
        FAST: (ours.OURS_FAST, (peers.SCALED_MM_FAST,)),
    }
    """Our arm and its peers."""

    def __init__(self, problem: Fp8GemmProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        ours_of, peer_of = (
            partial(build, self.problem, sets[0]) for build in (ours.gemm_arm, peers.scaled_mm)
        )
        offers: list[Offer] = []
        for variant, (own_name, peer_names) in self.variants.items():
            offers.append(own(own_name, partial(ours_of, own_name, variant), variant))
            offers += [offer(one, partial(peer_of, one, variant), variant) for one in peer_names]
        return [*offers, peers.cublas_bf16(self.problem)]

    @override
    def plans(self) -> Sequence[Any]:
        sample, target = self.problem.make_set("meta"), _target()
        return [ours.gemm_plan(self.problem, sample, one, target) for one in (PROMOTED, FAST)]


class PrecisionBlockCase(SampledCase):
    """A mode against the fused BF16 block on the same values; eager and as a graph."""

    family = "block"
    kinds = (family, "latency")
    modes = ("eager", "graph")
    has_equal_bursts = True

    def __init__(self, problem: PrecisionBlockProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        arms = partial(ours.block_arm, self.problem, sets[0])
        return [
            own(OURS, partial(arms, OURS, Role.OURS)),
            offer(ours.BF16_FUSED, partial(arms, ours.BF16_FUSED, Role.PEER)),
        ]

    @override
    def plans(self) -> Sequence[Any]:
        sample, target = self.problem.make_set("meta"), _target()
        names = (OURS, ours.BF16_FUSED)
        return [ours.block_plan(self.problem, sample, name, target) for name in names]


class Fp8SdpaCase(SampledCase):
    """Attention of codes against FlashAttention-3's FP8 forward."""

    family = "sdpa"
    kinds = (family, "latency")
    has_equal_bursts = True

    def __init__(self, problem: Fp8SdpaProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        operands = (self.problem, sets[0])
        peer = partial(peers.flash_attention_3, *operands)
        return [own(OURS, partial(ours.sdpa_arm, *operands)), offer(peers.FA3_FP8, peer)]

    @override
    def plans(self) -> Sequence[Any]:
        return [ours.sdpa_plan(self.problem, self.problem.make_set("meta"), _target())]


def _target() -> Target:
    """The GPU at hand."""
    return Target.of_device(torch.device("cuda", torch.cuda.current_device()))
