# SPDX-License-Identifier: Apache-2.0
"""Operands of one call of the gated attention block, its plan, and what has to come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cudnn_blocks import GatedAttentionGeometry
from tests.helpers.tensors import clone_exact
from tests.oracles import gated_attention_reference as oracle

READ = ("h", "w_qkvg", "w_q_norm", "w_k_norm", "cos", "sin", "w_o")
"""Operands that are only read, in the order of ``execute``."""
KNOBS = tuple(
    {"fuse_norm_rope": norm_rope, "fuse_gate": gate}
    for norm_rope in (False, True)
    for gate in (False, True)
)
DTYPES = (torch.bfloat16, torch.float16)
SMALL = GatedAttentionGeometry(d_model=128, h_q=4, h_kv=2, d_head=64, rope_dim=16)


@dataclass(frozen=True)
class GatedProblem:
    """One call; ``clone()`` before a run whose outputs are to be compared."""

    geometry: GatedAttentionGeometry
    operands: dict[str, torch.Tensor | None]
    """Keyword arguments of ``execute``, workspace and stream apart."""
    knobs: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.operands[name]
        assert tensor is not None, name
        return tensor

    @property
    def plan_knobs(self) -> dict[str, Any]:
        return {
            "return_lse": self.operands["lse"] is not None,
            "seq_lens_present": self.operands["seq_lens"] is not None,
            **self.knobs,
        }

    def plan(self, **knobs: Any):
        from cudnn_blocks import GatedAttentionBlockFwd

        samples = [self.operands[name] for name in (*READ, "out")]
        return GatedAttentionBlockFwd(*samples, self.geometry, **{**self.plan_knobs, **knobs})

    def compiled(self, **knobs: Any):
        plan = self.plan(**knobs)
        plan.compile()
        return plan

    def workspace(self, plan: Any, fill: int = 0xFF) -> torch.Tensor:
        size_bytes = plan.get_workspace_size()
        device = self["h"].device
        raw = torch.full((size_bytes + 256,), fill, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % 256
        return raw[start : start + size_bytes]

    def execute(self, plan: Any, **changes: Any) -> GatedProblem:
        if "workspace" not in changes:
            changes["workspace"] = self.workspace(plan)
        plan.execute(**{**self.operands, **changes})
        return self

    def run(self, **knobs: Any) -> GatedProblem:
        return self.execute(self.compiled(**knobs))

    def clone(self) -> GatedProblem:
        """Copies of its own; a table shared by all entries stays, since nothing writes it."""
        copies = {
            name: tensor if tensor is None or 0 in tensor.stride() else clone_exact(tensor)
            for name, tensor in self.operands.items()
        }
        return replace(self, operands=copies)

    def with_(self, **operands: torch.Tensor | None) -> GatedProblem:
        return replace(self, operands={**self.operands, **operands})

    def with_knobs(self, **knobs: Any) -> GatedProblem:
        return replace(self, knobs={**self.knobs, **knobs})

    def to(self, device: torch.device | str) -> GatedProblem:
        moved = {n: None if t is None else t.to(device) for n, t in self.operands.items()}
        return replace(self, operands=moved)

    def expected(self) -> oracle.Expected:
        """The FP64 oracle's results; for small problems."""
        on_cpu = self.to("cpu").operands
        seq_lens = on_cpu["seq_lens"]
        return oracle.gated_attention(
            *(on_cpu[name] for name in READ),
            self.geometry,
            None if seq_lens is None else seq_lens.tolist(),
            fuse_norm_rope=self.knobs.get("fuse_norm_rope", False),
        )


def make_problem(
    geometry: GatedAttentionGeometry = SMALL,
    batch: int = 2,
    tokens: int = 8,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seq_lens: Sequence[int] | None = None,
    has_lse: bool = False,
    table_rows: int | None = None,
    **knobs: Any,
) -> GatedProblem:
    """Random operands at sizes that keep every value near 1; outputs poisoned with NaN."""

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape) * std).to(device, dtype)

    d_model, d_head = geometry.d_model, geometry.d_head
    has_norm, rope_dim = geometry.qk_norm, geometry.rope_dim
    cos, sin = rope_tables(batch, table_rows or tokens, rope_dim, dtype, device)
    operands: dict[str, torch.Tensor | None] = {
        "h": normal(batch, tokens, d_model),
        "w_qkvg": normal(geometry.n_qkvg, d_model, std=d_model**-0.5),
        "w_q_norm": 1 + normal(d_head, std=0.1) if has_norm else None,
        "w_k_norm": 1 + normal(d_head, std=0.1) if has_norm else None,
        "cos": cos,
        "sin": sin,
        "w_o": normal(d_model, geometry.attn_width, std=geometry.attn_width**-0.5),
        "out": torch.full((batch, tokens, d_model), float("nan"), dtype=dtype, device=device),
        "seq_lens": None
        if seq_lens is None
        else torch.tensor(seq_lens, dtype=torch.int32, device=device),
        "lse": torch.full((batch, geometry.h_q, tokens), float("nan"), device=device)
        if has_lse
        else None,
    }
    return GatedProblem(geometry, operands, knobs)


def rope_tables(
    batch: int,
    rows: int,
    rope_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    theta: float = 10_000.0,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``cos`` and ``sin`` ``[B, rows, R]`` of consecutive positions, alike for all entries."""
    if rope_dim == 0:
        return None, None
    rate = theta ** (-torch.arange(0, rope_dim, 2) / rope_dim)
    angles = (torch.arange(rows)[:, None] * rate).repeat(1, 2)
    return (
        angles.cos().to(device, dtype).repeat(batch, 1, 1),
        angles.sin().to(device, dtype).repeat(batch, 1, 1),
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """A few roundings of the activation dtype away, measured by the scale of the result.

    The scale is that of all rows or, where a row averages few keys and is larger, of the row. A
    transposed head, a key too many or a gate of another head is off by its whole scale.
    """
    exact, got = expected.double().cpu(), actual.double().cpu()
    assert bool(got.isfinite().all()), f"{what}: not finite"
    power = exact.square()
    scale = power.mean(-1, keepdim=True).maximum(power.mean()).sqrt() + 1e-30
    error = (got - exact).abs() / (scale * torch.finfo(actual.dtype).eps)
    mean, worst = error.square().mean().sqrt().item(), error.max().item()
    assert mean <= 1.5, f"{what}: off by {mean} roundings in the mean"
    assert worst <= 12, f"{what}: off by {worst} roundings at worst"
