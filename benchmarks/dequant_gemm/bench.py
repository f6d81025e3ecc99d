# SPDX-License-Identifier: Apache-2.0
"""How a product with coded weights is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from benchmarks.dequant_gemm import peers
from benchmarks.gated_attention_block.ours import OURS, engines_of
from benchmarks.harness.arm import Arm, Launch, Offer, Role, offer, own
from benchmarks.harness.memory import held
from benchmarks.harness.outputs import OutputsCase
from cudnn_blocks import DequantGemm
from cudnn_blocks.target import Target

if TYPE_CHECKING:
    from benchmarks.dequant_gemm.problem import DequantGemmProblem, Tensors
    from benchmarks.harness.timing import GraphTimer

OPERANDS = ("x", "w", "w_sf", "y")


class DequantGemmCase(OutputsCase):
    """Codes of weights against the same weights in BF16, and against another product of codes."""

    family = "gemm"
    kinds = (family, "latency")

    def __init__(self, problem: DequantGemmProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        ours = own(OURS, partial(self._ours, sets[0]))
        found: list[Offer] = [ours, peers.cublas_bf16(self.problem)]
        build = partial(peers.quack, self.problem, sets[0])
        weight_only = offer(peers.QUACK, build, peers.WEIGHT_ONLY)
        if isinstance(weight_only, Arm):
            found.append(replace(ours, variant=peers.WEIGHT_ONLY))
        return [*found, weight_only]

    @override
    def plans(self) -> Sequence[Any]:
        target = Target.of_device(torch.device("cuda", torch.cuda.current_device()))
        return [self._plan(self.problem.make_set("meta"), target)]

    def _plan(self, sample: Tensors, target: Any = None) -> DequantGemm:
        samples = (sample[name] for name in OPERANDS)
        return DequantGemm(*samples, w_format=self.problem.fmt, target=target)

    def _ours(self, sample: Tensors) -> Arm:
        plan = self._plan(sample)
        plan.compile()
        workspace_bytes = plan.get_workspace_size()
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=self.device)

        def bind(buffers: Tensors) -> Launch:
            operands: dict[str, Any] = {name: buffers[name] for name in OPERANDS}
            return partial(plan.execute, **operands, workspace=workspace)

        engine = f"{engines_of(plan)}; {held(self.problem.weight_bytes, workspace_bytes)}"
        return Arm(OURS, Role.OURS, engine, bind, description=plan.describe())
