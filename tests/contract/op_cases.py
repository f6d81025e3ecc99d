# SPDX-License-Identifier: Apache-2.0
"""The registry of the contract suite: every op and block adds its cases and refusals here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cudnn_blocks.api_base import APIBase
from cudnn_blocks.stages.stage import Stage
from tests.contract import (
    conv1d_cases,
    conv3d_cases,
    dequant_gemm_cases,
    gated_attention_cases,
    gemm_cases,
    pointwise_cases,
    quantize_cases,
    sdpa_cases,
)
from tests.helpers.tensors import clone_exact

Operands = dict[str, torch.Tensor | None]


@dataclass
class BuiltOp:
    """A plan, not compiled yet, and one legal call of it."""

    plan: APIBase
    operands: Operands
    """Keyword arguments of ``execute``, None for what is not declared; no workspace."""
    mutated: frozenset[str]
    """Operands that ``execute`` may write."""
    check: Callable[[Operands, Operands], None]
    """Raises unless the operands after a call (second) follow from those before it (first)."""
    result: str = "out"
    """The mutated operand that is written whole and that the functional form returns."""
    returned: frozenset[str] = frozenset({"out"})
    """Mutated operands that the functional form makes anew instead of writing to."""

    def compiled(self) -> BuiltOp:
        self.plan.compile()
        return self

    def workspace(self) -> dict[str, torch.Tensor]:
        """A poisoned workspace of exactly the right size as a keyword, or nothing."""
        size_bytes = self.plan.get_workspace_size()
        if size_bytes == 0:
            return {}
        device = self.operands[next(iter(self.operands))].device
        return {"workspace": torch.full((size_bytes,), 0xFF, dtype=torch.uint8, device=device)}

    def clone(self) -> Operands:
        return clone_operands(self.operands)

    def run(self, operands: Operands, **extra: Any) -> Operands:
        self.plan.execute(**operands, **extra)
        return operands


@dataclass(frozen=True)
class OpCase:
    """One configuration of an op, runnable on a CPU or a GPU."""

    name: str
    build: Callable[[torch.device], BuiltOp]
    functional: Callable[[Operands], torch.Tensor] | None = None
    """The op's functional form on the same operands, if it has one."""
    is_in_place: bool = False
    """The result is read before it is written."""


@dataclass(frozen=True)
class Neighbour:
    """A request just outside a capabilities row, and the typed refusal that it gets."""

    name: str
    fact: str
    """Fact of the row that it leaves, or ``target``."""
    build: Callable[[str], APIBase]
    """A plan for a target, from meta samples."""
    error: type[Exception]
    match: str


@dataclass(frozen=True)
class ServedOp:
    """What the contract suite knows of one stage's capabilities."""

    stage: type[Stage]
    passing: Mapping[str, Callable[[torch.device | str, str | None], BuiltOp]]
    """Name to a builder for a device, or for ``meta`` with a target."""
    neighbours: tuple[Neighbour, ...] = field(default=())


def clone_operands(operands: Operands) -> Operands:
    return {name: None if t is None else clone_exact(t) for name, t in operands.items()}


def restore(operands: Operands, source: Operands) -> None:
    """Copies values back in place; addresses stay."""
    for name, tensor in operands.items():
        if tensor is not None:
            tensor.copy_(source[name])


OP_CASES = tuple(
    OpCase(name, lambda device, make=make: BuiltOp(*make(device)), conv1d_cases.functional(name))
    for name, make in conv1d_cases.CASES.items()
) + tuple(
    OpCase(name, lambda device, make=make: BuiltOp(**make(device)), conv3d_cases.functional(name))
    for name, make in conv3d_cases.CASES.items()
)
OP_CASES += tuple(
    OpCase(name, lambda device, make=make: BuiltOp(**make(device)), sdpa_cases.functional(name))
    for name, make in sdpa_cases.CASES.items()
)
OP_CASES += tuple(
    OpCase(
        name,
        lambda device, make=make: BuiltOp(**make(device)),
        pointwise_cases.functional(name),
        is_in_place=name in pointwise_cases.IN_PLACE,
    )
    for name, make in pointwise_cases.CASES.items()
)
OP_CASES += tuple(
    OpCase(
        name,
        lambda device, make=make: BuiltOp(**make(device)),
        gated_attention_cases.functional(name),
    )
    for name, make in gated_attention_cases.CASES.items()
)
OP_CASES += tuple(
    OpCase(name, lambda device, make=make: BuiltOp(**make(device)), gemm_cases.functional(name))
    for name, make in gemm_cases.CASES.items()
)
OP_CASES += tuple(
    OpCase(name, lambda device, make=make: BuiltOp(**make(device)), quantize_cases.functional(name))
    for name, make in quantize_cases.CASES.items()
)
OP_CASES += tuple(
    OpCase(
        name,
        lambda device, make=make: BuiltOp(**make(device)),
        dequant_gemm_cases.functional(name),
    )
    for name, make in dequant_gemm_cases.CASES.items()
)
SERVED_OPS = (
    ServedOp(
        conv1d_cases.STAGE,
        {
            name: lambda device, target, make=make: BuiltOp(*make(device, target))
            for name, make in conv1d_cases.PASSING.items()
        },
        tuple(Neighbour(**neighbour) for neighbour in conv1d_cases.NEIGHBOURS),
    ),
)
