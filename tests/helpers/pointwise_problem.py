# SPDX-License-Identifier: Apache-2.0
"""Operands of one QK-norm + RoPE or sigmoid gate call, and what has to come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from cudnn_blocks import QkNormRope, SigmoidGate, TensorSpec
from cudnn_blocks.reference.qk_norm_rope import qk_norm_rope
from cudnn_blocks.reference.sigmoid_gate import sigmoid_gate
from tests.helpers.tensors import assert_same_bits, clone_exact

Operands = dict[str, torch.Tensor | None]
DTYPES = (torch.bfloat16, torch.float16)
ULPS_OF_ONE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ATOL = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass(frozen=True)
class QkProblem:
    """One call of QkNormRope; ``clone()`` before a run whose operands are to be compared."""

    operands: Operands
    eps: float = 1e-6

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.operands[name]
        assert tensor is not None, name
        return tensor

    def plan(self, **knobs: Any) -> QkNormRope:
        knobs = {"qk_norm_eps": self.eps, **knobs}
        return QkNormRope(*self.operands.values(), **knobs)

    def run(self, plan: QkNormRope | None = None, **knobs: Any) -> QkProblem:
        """Runs in place."""
        if plan is None:
            plan = self.plan(**knobs)
            plan.compile()
        plan.execute(*self.operands.values())
        return self

    def clone(self) -> QkProblem:
        """Every operand in memory of its own, strides kept; expanded tables stay as they are."""
        copies = {
            n: t if t is None or 0 in t.stride() else clone_exact(t)
            for n, t in self.operands.items()
        }
        return replace(self, operands=copies)

    def with_(self, **operands: torch.Tensor | None) -> QkProblem:
        return replace(self, operands={**self.operands, **operands})

    def expected(self) -> QkProblem:
        """By the reference, on the operands' device."""
        done = self.clone()
        qk_norm_rope(*done.operands.values(), self.eps)
        return done


def make_qk(
    shape: tuple[int, int, int, int, int] = (2, 5, 4, 2, 64),
    rope_dim: int = 16,
    *,
    dtype: torch.dtype = torch.bfloat16,
    has_norm: bool = True,
    in_slab: bool = True,
    spare_rows: int = 3,
    is_expanded: bool = False,
    eps: float = 1e-6,
    device: torch.device | str = "cpu",
) -> QkProblem:
    """Random operands.

    Args:
        shape: B, S, h_q, h_kv, D.
        rope_dim: 0 for no rotation.
        dtype: of every operand.
        has_norm: with norm weights.
        in_slab: Q and K are column bands ``Q | gap | K | gap`` of one array.
        spare_rows: rows of the tables past S.
        is_expanded: the tables have batch stride 0.
        eps: of the norm.
        device: of every operand.
    """
    b, s, h_q, h_kv, d = shape
    scale = torch.rand(b, s, h_q + h_kv, 1) * 3 + 0.1
    heads = (torch.randn(b, s, h_q + h_kv, d) * scale).to(device, dtype)
    q, k = heads[:, :, :h_q], heads[:, :, h_q:]
    if in_slab:
        bands = (h_q * d, 40, h_kv * d, 24)
        slab = torch.randn(b, s, sum(bands)).to(device, dtype)
        columns = slab.split(bands, dim=-1)
        q, k = (columns[i].unflatten(-1, (-1, d)).copy_(x.to(device)) for i, x in ((0, q), (2, k)))
    else:
        q, k = q.contiguous(), k.contiguous()

    def weight() -> torch.Tensor | None:
        return (1 + 0.3 * torch.randn(d)).to(device, dtype) if has_norm else None

    cos, sin = make_tables(b, s + spare_rows, rope_dim, dtype, is_expanded, device)
    operands = {
        "q": q,
        "k": k,
        "w_q_norm": weight(),
        "w_k_norm": weight(),
        "cos": cos,
        "sin": sin,
    }
    return QkProblem(operands, eps)


def make_tables(
    batch: int,
    rows: int,
    rope_dim: int,
    dtype: torch.dtype,
    is_expanded: bool,
    device: torch.device | str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Cosines and sines whose halves differ, so that a mix-up of the two shows."""
    if rope_dim == 0:
        return None, None
    angles = torch.rand(1 if is_expanded else batch, rows, rope_dim) * 6.3
    tables = (torch.cos(angles), torch.sin(angles))
    cos, sin = (table.to(device, dtype).expand(batch, -1, -1) for table in tables)
    return cos, sin


@dataclass(frozen=True)
class GateProblem:
    """One call of SigmoidGate."""

    operands: dict[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.operands[name]

    def plan(self, **knobs: Any) -> SigmoidGate:
        return SigmoidGate(*self.operands.values(), **knobs)

    def run(self, plan: SigmoidGate | None = None, **knobs: Any) -> GateProblem:
        if plan is None:
            plan = self.plan(**knobs)
            plan.compile()
        plan.execute(*self.operands.values())
        return self

    def with_(self, **operands: torch.Tensor) -> GateProblem:
        return replace(self, operands={**self.operands, **operands})

    def expected(self) -> torch.Tensor:
        """By the reference, on the operands' device."""
        out = clone_exact(self["out"])
        sigmoid_gate(self["o"], self["gate"], out)
        return out


def make_gate(
    shape: tuple[int, int, int, int] = (2, 5, 4, 64),
    *,
    dtype: torch.dtype = torch.bfloat16,
    in_place: bool = False,
    device: torch.device | str = "cpu",
) -> GateProblem:
    """Random operands of ``[B, S, H, D]``; the gate is a column band of a wider array."""
    b, s, h, d = shape
    o = torch.randn(b, s, h, d).to(device, dtype)
    slab = (3 * torch.randn(b, s, 2 * h * d + 24)).to(device, dtype)
    gate = slab[:, :, h * d : 2 * h * d].unflatten(-1, (h, d))
    out = o if in_place else torch.empty_like(o)
    return GateProblem({"o": o, "gate": gate, "out": out})


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Within one rounding: engines sum squares in other orders and know other exponentials."""
    torch.testing.assert_close(
        actual,
        expected,
        rtol=2 * ULPS_OF_ONE[actual.dtype],
        atol=ATOL[actual.dtype] / 16,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def assert_heads(actual: QkProblem, expected: QkProblem) -> None:
    """On the CPU the engine is the reference: bit for bit."""
    same = assert_same_bits if actual["q"].device.type == "cpu" else assert_close
    for name in ("q", "k"):
        same(actual[name], expected[name], name)


def spec_qk(
    shape: tuple[int, int, int, int, int] = (2, 5, 4, 2, 64),
    rope_dim: int = 16,
    *,
    dtype: torch.dtype = torch.bfloat16,
    has_norm: bool = True,
    table_rows: int | None = None,
    **knobs: Any,
) -> QkNormRope:
    """A plan without tensors; compact strides."""
    b, s, h_q, h_kv, d = shape
    samples: Mapping[str, tuple[int, ...] | None] = {
        "q": (b, s, h_q, d),
        "k": (b, s, h_kv, d),
        "w_q_norm": (d,) if has_norm else None,
        "w_k_norm": (d,) if has_norm else None,
        "cos": (b, table_rows or s, rope_dim) if rope_dim else None,
        "sin": (b, table_rows or s, rope_dim) if rope_dim else None,
    }
    specs = [None if of is None else TensorSpec.contiguous(of, dtype) for of in samples.values()]
    return QkNormRope(*specs, **knobs)


def spec_gate(
    shape: tuple[int, int, int, int] = (2, 5, 4, 64),
    *,
    dtype: torch.dtype = torch.bfloat16,
    **knobs: Any,
) -> SigmoidGate:
    """A plan without tensors; compact strides."""
    spec = TensorSpec.contiguous(shape, dtype)
    return SigmoidGate(spec, spec, spec, **knobs)
