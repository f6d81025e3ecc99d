# SPDX-License-Identifier: Apache-2.0
"""``out = 2 * x`` as an op with a workspace: the lifecycle without a kernel."""

from __future__ import annotations

import torch

from cudnn_blocks.api_base import APIBase
from cudnn_blocks.geometry.frozen import frozen
from cudnn_blocks.operands import Contiguous, Operand, OperandTable
from cudnn_blocks.stages.capabilities import AtLeast, Capabilities, OneOf
from cudnn_blocks.stages.stage import Stage

WORKSPACE_BYTES = 512


@frozen
class ToyGeometry:
    columns: int

    def validate(self) -> None: ...


class ToyStage(Stage):
    """Counts its compiles; on a GPU target it calls whatever ``launcher`` is."""

    name = "double"
    rows = (
        Capabilities("fast", OneOf(("sm_90a",)), {"columns": OneOf((8,))}),
        Capabilities("reference", OneOf(("cpu",)), {"columns": AtLeast(2)}),
    )

    def __init__(self, facts, target, engine=None):
        super().__init__(facts, target, engine)
        self.compiles = 0

    def book(self, layout):
        layout.book("doubled", 4 * self.facts["columns"])
        layout.book_scratch(8)

    def compile(self):
        self.compiles += 1

    def run_reference(self, operands):
        x, out = operands
        torch.mul(x, 2, out=out)

    def launch(self, operands, stream): ...

    def describe(self):
        return "one multiplication"


class ToyOp(APIBase):
    op_name = "toy"

    def __init__(self, sample_x, sample_out, geometry, *, target=None, engines=None):
        super().__init__(
            {"x": sample_x, "out": sample_out}, geometry, target=target, engines=engines
        )

    def execute(self, x, out, workspace, current_stream=None):
        self._launch((x, out), current_stream, workspace)

    def _build_operands(self):
        columns = self.geometry.columns
        return OperandTable(
            (
                Operand("x", torch.float32, ("N", columns), Contiguous()),
                Operand("out", torch.float32, ("N", columns), Contiguous(), is_mutated=True),
            )
        )

    def _build_stages(self, target, engines):
        facts = {"columns": self.geometry.columns}
        return (ToyStage(facts, target, engines.get(ToyStage.name)),)


def make_toy(columns: int = 8, rows: int = 3, device: str = "cpu", **knobs) -> ToyOp:
    x = torch.ones(rows, columns, device=device)
    return ToyOp(x, torch.empty_like(x), ToyGeometry(columns), **knobs)
