# SPDX-License-Identifier: Apache-2.0
"""Operands of one attention call, the plan for them, and what has to come out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cudnn_blocks import SdpaFwd, SdpaGeometry, TensorSpec
from cudnn_blocks.reference.attention import AttentionMask, sdpa
from tests.helpers.tensors import clone_exact

NAMES = ("q", "k", "v", "o", "gate", "lse", "seq_lens")
"""Operands in the order of ``execute``."""
WRITTEN = frozenset({"o", "lse"})
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_MMA_K = 16
"""Channels that a tensor core adds to a score at a time; it truncates each of these sums."""


@dataclass(frozen=True)
class SdpaProblem:
    """One call; ``clone()`` before a run that is to be repeated."""

    geometry: SdpaGeometry
    operands: dict[str, torch.Tensor | None]

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.operands[name]
        assert tensor is not None, name
        return tensor

    @property
    def mask(self) -> AttentionMask:
        g = self.geometry
        return AttentionMask(g.is_causal, g.causal_bottom_right, g.window_left, g.window_right)

    def plan(self, **keywords: Any) -> SdpaFwd:
        operands = self.operands
        return SdpaFwd(
            *(self[name] for name in NAMES[:4]),
            self.geometry,
            sample_gate=operands["gate"],
            return_lse=operands["lse"] is not None,
            seq_lens_present=operands["seq_lens"] is not None,
            **keywords,
        )

    def compiled(self, **keywords: Any) -> SdpaFwd:
        plan = self.plan(**keywords)
        plan.compile()
        return plan

    def run(self, plan: SdpaFwd | None = None, **keywords: Any) -> SdpaProblem:
        """Executes in place, on a new plan where none is given."""
        (plan or self.compiled(**keywords)).execute(**self.operands)
        return self

    def clone(self) -> SdpaProblem:
        copies = {n: None if t is None else clone_exact(t) for n, t in self.operands.items()}
        return replace(self, operands=copies)

    def with_(self, **operands: torch.Tensor | None) -> SdpaProblem:
        return replace(self, operands={**self.operands, **operands})

    def expected(self) -> SdpaProblem:
        """The same operands beside what the reference writes."""
        o = torch.full_like(self["o"], math.nan, memory_format=torch.contiguous_format)
        lse = self.operands["lse"]
        lse = None if lse is None else torch.full_like(lse, math.nan)
        operands = {**self.operands, "o": o, "lse": lse}
        sdpa(*operands.values(), self.geometry.scale, self.mask)
        return replace(self, operands=operands)

    def magnitude(self) -> torch.Tensor:
        """FP32 shape of o: the sum of every weight times the size of its value."""
        o = torch.empty_like(self["o"], memory_format=torch.contiguous_format)
        sizes = {**self.operands, "v": self["v"].abs(), "o": o, "gate": None, "lse": None}
        sdpa(*sizes.values(), self.geometry.scale, self.mask)
        return o.float()


def assert_matches(actual: SdpaProblem, expected: SdpaProblem, what: str = "") -> None:
    """Within the roundings of weights, sums and results; rows without a key exactly."""
    o, wanted = actual["o"].float(), expected["o"].float()
    # Both round every weight once and the result once or, with a gate, twice.
    bound = 5 * ROUNDOFF[actual["o"].dtype] * expected.magnitude() + 1e-6
    wrong = ~((o - wanted).abs() <= bound)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {o.numel()} outputs are wrong, the first at "
            f"{list(where)}: {o[where].item()} for {wanted[where].item()} "
            f"within {bound[where].item()}"
        )
    if actual.operands["lse"] is not None:
        torch.testing.assert_close(
            actual["lse"],
            expected["lse"],
            rtol=max(1e-6, actual["q"].shape[-1] / _MMA_K * 2**-23),
            atol=2e-5,
            msg=lambda text: f"{what} lse: {text}",
        )
        dead = o[(expected["lse"] == -math.inf).transpose(1, 2)]
        assert torch.equal(dead, torch.zeros_like(dead)), f"{what}: rows without a key"


def make_problem(
    b: int = 2,
    s: int = 7,
    sk: int | None = None,
    heads: tuple[int, int] = (4, 2),
    d_head: int = 64,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    has_gate: bool = False,
    has_lse: bool = True,
    seq_lens: Sequence[int] | None = None,
    is_slab: bool = False,
    **mask: Any,
) -> SdpaProblem:
    """Random operands; written ones hold NaN.

    Args:
        b: B.
        s: S.
        sk: Sk, S where it is None.
        heads: h_q, h_kv.
        d_head: D.
        dtype: of all but lse and seq_lens.
        device: where.
        has_gate: with a gate.
        has_lse: with an LSE.
        seq_lens: length of each batch entry.
        is_slab: q, gate, k and v are column bands of one slab; S and Sk are equal then.
        **mask: further fields of the geometry.
    """
    h_q, h_kv = heads
    sk = s if sk is None else sk

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    if is_slab:
        assert s == sk
        slab = random(b, s, (2 * h_q + 2 * h_kv) * d_head)
        widths = [n * d_head for n in (h_q, h_q, h_kv, h_kv)]
        q, gate, k, v = (x.unflatten(2, (-1, d_head)) for x in slab.split(widths, dim=2))
    else:
        q, gate = random(b, s, h_q, d_head), random(b, s, h_q, d_head)
        k, v = random(b, sk, h_kv, d_head), random(b, sk, h_kv, d_head)
    lens = None
    if seq_lens is not None:
        lens = torch.tensor(list(seq_lens), dtype=torch.int32, device=device)
    operands = {
        "q": q,
        "k": k,
        "v": v,
        "o": torch.full((b, s, h_q, d_head), math.nan, dtype=dtype, device=device),
        "gate": gate if has_gate else None,
        "lse": torch.full((b, h_q, s), math.nan, device=device) if has_lse else None,
        "seq_lens": lens,
    }
    return SdpaProblem(SdpaGeometry(h_q, h_kv, d_head, **mask), operands)


def spec_plan(
    b: int = 1,
    s: int = 1000,
    sk: int | None = None,
    heads: tuple[int, int] = (4, 2),
    d_head: int = 64,
    *,
    dtype: torch.dtype = torch.bfloat16,
    target: str,
    engines: dict[str, str] | None = None,
    has_gate: bool = False,
    has_lse: bool = False,
    has_seq_lens: bool = False,
    **mask: Any,
) -> SdpaFwd:
    """A plan over specs for a named target: no memory, no GPU."""
    h_q, h_kv = heads
    q = TensorSpec.contiguous((b, s, h_q, d_head), dtype)
    k = TensorSpec.contiguous((b, s if sk is None else sk, h_kv, d_head), dtype)
    return SdpaFwd(
        q,
        k,
        k,
        q,
        SdpaGeometry(h_q, h_kv, d_head, **mask),
        sample_gate=q if has_gate else None,
        return_lse=has_lse,
        seq_lens_present=has_seq_lens,
        target=target,
        engines=engines,
    )
