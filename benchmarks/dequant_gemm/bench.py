# SPDX-License-Identifier: Apache-2.0
"""How a product with coded weights is measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from benchmarks.harness.arm import Arm, Launch, Offer, Role, own
from benchmarks.harness.outputs import OutputsCase
from cudnn_blocks import DequantGemm
from cudnn_blocks.target import Target

if TYPE_CHECKING:
    from benchmarks.dequant_gemm.problem import DequantGemmProblem, Tensors
    from benchmarks.harness.timing import GraphTimer

OPERANDS = ("x", "w", "w_sf", "y")
MIB = 1 << 20


class DequantGemmCase(OutputsCase):
    """Codes of weights against the same weights in BF16."""

    family = "gemm"
    kinds = (family, "latency")

    def __init__(self, problem: DequantGemmProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        return [own("ours", lambda: self._ours(sets[0])), cublas()]

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
        engine = ", ".join(str(stage.engine) for stage in plan.probe().stages)
        workspace_bytes = plan.get_workspace_size()
        workspace = torch.empty(workspace_bytes, dtype=torch.uint8, device=self.device)
        held = self.problem.weight_bytes
        memory = f"weights {held / MIB:.1f} MiB, workspace {workspace_bytes / MIB:.1f} MiB"

        def bind(buffers: Tensors) -> Launch:
            return partial(plan.execute, *(buffers[name] for name in OPERANDS), workspace)

        return Arm("ours", Role.OURS, engine, bind, description=f"{plan.describe()}\n{memory}")


def cublas() -> Arm:
    """``torch.mm`` of the weights' values, into the result."""

    def bind(buffers: Tensors) -> Launch:
        x, w, y = (buffers[name] for name in ("x", "values", "y"))
        return partial(_product, x[0], w.t(), y[0])

    return Arm("cublas-bf16", Role.PEER, "torch.mm", bind)


def _product(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    torch.mm(x, w, out=y)
