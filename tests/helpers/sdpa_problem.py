# SPDX-License-Identifier: Apache-2.0
"""Operands of one attention call, the plan for them, and what has to come out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cudnn_blocks import SdpaFwd, SdpaGeometry, TensorSpec
from cudnn_blocks.reference.attention import AttentionMask, sdpa
from tests.helpers.tensors import clone_exact

NAMES = ("q", "k", "v", "o", "gate", "lse", "seq_lens")
"""Operands in the order of ``execute``."""
WRITTEN = frozenset({"o", "lse"})
CODES = torch.float8_e4m3fn
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, CODES: 2.0**-4}
SCALES = {"descale_q": 0.5, "descale_k": 1.5, "descale_v": 0.375}
"""Of problems in codes; ``scale_o`` comes to them where o is in codes."""
SCALE_O = 24.0
WEIGHT_NOISE = 0.3
"""Six standard deviations of what two roundings of a weight to e4m3 differ by."""
CODES_LSE_ERROR = 3e-3
"""Tensor cores sum products of codes in fewer bits than FP32 has."""
_MMA_K = 16
"""Channels that a tensor core adds to a score at a time; it truncates each of these sums."""


@dataclass(frozen=True)
class SdpaProblem:
    """One call; ``clone()`` before a run that is to be repeated."""

    geometry: SdpaGeometry
    operands: dict[str, torch.Tensor | None]
    scales: dict[str, float] = field(default_factory=dict)
    """Further keywords of the plan, of codes."""

    @property
    def scale(self) -> float:
        """Of the products of what q and k hold."""
        one = self.scales
        return self.geometry.scale * one.get("descale_q", 1.0) * one.get("descale_k", 1.0)

    def reference(self, operands: dict[str, torch.Tensor | None]) -> None:
        """Writes o and lse."""
        scales = (self.scales.get("descale_v", 1.0), self.scales.get("scale_o", 1.0))
        sdpa(*operands.values(), self.scale, self.mask, *scales)

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
            **self.scales,
            **keywords,
        )

    def compiled(self, **keywords: Any) -> SdpaFwd:
        plan = self.plan(**keywords)
        plan.compile()
        return plan

    def run(self, plan: SdpaFwd | None = None, **keywords: Any) -> SdpaProblem:
        """Executes in place, on a new plan where none is given."""
        plan = plan or self.compiled(**keywords)
        workspace, size_bytes = None, plan.get_workspace_size()
        if size_bytes:
            device = self["q"].device
            workspace = torch.full((size_bytes,), 0xFF, dtype=torch.uint8, device=device)
        plan.execute(**self.operands, workspace=workspace)
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
        self.reference(operands)
        return replace(self, operands=operands)

    def magnitude(self) -> torch.Tensor:
        """FP32 shape of o: the sum of every weight times the size of its value."""
        o = torch.empty_like(self["o"], memory_format=torch.contiguous_format)
        sizes = {**self.operands, "v": self["v"].abs(), "o": o, "gate": None, "lse": None}
        sdpa(*sizes.values(), self.geometry.scale, self.mask)
        return o.float()

    @property
    def truncation(self) -> float:
        """Relative error of a score whose sums a tensor core truncates."""
        return self["q"].shape[-1] / _MMA_K * 2**-23

    def score_error(self) -> float:
        """Of scores as large as the largest LSE; without one they are taken for small."""
        lse = self.operands["lse"]
        if lse is None:
            return 0.0
        sizes = lse[lse.isfinite()].abs()
        return self.truncation * sizes.max().item() if sizes.numel() else 0.0

    def weight_noise(self) -> torch.Tensor:
        """FP32 shape of o: what weights that are rounded to codes at random add up to."""
        widened = {name: self[name].float() for name in ("q", "k", "v")}
        widened["v"] = widened["v"] ** 2
        squares = torch.zeros_like(widened["q"])
        sizes = {**self.operands, **widened, "o": squares, "gate": None}
        # Twice the scale squares every weight, but for the factor that normalises it.
        sums = []
        for factor in (1, 2):
            lse = squares.new_empty(squares.shape[0], squares.shape[2], squares.shape[1])
            sizes["lse"] = lse
            sdpa(*sizes.values(), factor * self.scale, self.mask)
            sums.append(lse)
        ratio = torch.exp(sums[1] - 2 * sums[0]).nan_to_num(0.0)
        noise = torch.sqrt(squares * ratio.transpose(1, 2).unsqueeze(-1))
        return WEIGHT_NOISE * self.scales["descale_v"] * noise


def assert_matches(actual: SdpaProblem, expected: SdpaProblem, what: str = "") -> None:
    """Within the roundings of weights, sums and results; rows without a key exactly."""
    o, wanted = actual["o"].float(), expected["o"].float()
    is_fp8 = actual["q"].dtype == CODES
    if is_fp8:
        roundoff = 2 * (ROUNDOFF[actual["o"].dtype] + ROUNDOFF[torch.bfloat16])
        noise = expected.weight_noise() * actual.scales.get("scale_o", 1.0)
        bound = noise + roundoff * wanted.abs() + 2.0**-8
    else:
        # Both round every weight once and the result once or, with a gate, twice; what a score is
        # off by is a factor of its weight.
        roundings = 5 * ROUNDOFF[actual["o"].dtype] + expected.score_error()
        bound = roundings * expected.magnitude() + 1e-6
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
            rtol=max(1e-6, actual.truncation),
            atol=CODES_LSE_ERROR if is_fp8 else 2e-5,
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
    o_dtype: torch.dtype | None = None,
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
        dtype: of all but lse and seq_lens; of e4m3, o and gate are BF16.
        o_dtype: of o, where it is e4m3 as well.
        device: where.
        has_gate: with a gate.
        has_lse: with an LSE.
        seq_lens: length of each batch entry.
        is_slab: q, gate, k and v are column bands of one slab; S and Sk are equal then.
        **mask: further fields of the geometry.
    """
    h_q, h_kv = heads
    sk = s if sk is None else sk

    act_dtype = torch.bfloat16 if dtype == CODES else dtype

    def random(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device).to(of)

    if is_slab:
        assert s == sk
        slab = random(b, s, (2 * h_q + 2 * h_kv) * d_head)
        widths = [n * d_head for n in (h_q, h_q, h_kv, h_kv)]
        q, gate, k, v = (x.unflatten(2, (-1, d_head)) for x in slab.split(widths, dim=2))
    else:
        q, gate = random(b, s, h_q, d_head), random(b, s, h_q, d_head, of=act_dtype)
        k, v = random(b, sk, h_kv, d_head), random(b, sk, h_kv, d_head)
    lens = None
    if seq_lens is not None:
        lens = torch.tensor(list(seq_lens), dtype=torch.int32, device=device)
    operands = {
        "q": q,
        "k": k,
        "v": v,
        "o": torch.full((b, s, h_q, d_head), math.nan, device=device).to(o_dtype or act_dtype),
        "gate": gate if has_gate else None,
        "lse": torch.full((b, h_q, s), math.nan, device=device) if has_lse else None,
        "seq_lens": lens,
    }
    geometry = SdpaGeometry(h_q, h_kv, d_head, **mask)
    return SdpaProblem(geometry, operands, scales_of(dtype, o_dtype))


def scales_of(dtype: torch.dtype, o_dtype: torch.dtype | None) -> dict[str, float]:
    """Keywords of a plan: of codes, none of them 1."""
    scales = dict(SCALES) if dtype == CODES else {}
    return {**scales, "scale_o": SCALE_O} if o_dtype == CODES else scales


def spec_plan(
    b: int = 1,
    s: int = 1000,
    sk: int | None = None,
    heads: tuple[int, int] = (4, 2),
    d_head: int = 64,
    *,
    dtype: torch.dtype = torch.bfloat16,
    o_dtype: torch.dtype | None = None,
    target: str,
    engines: dict[str, str] | None = None,
    has_gate: bool = False,
    has_lse: bool = False,
    has_seq_lens: bool = False,
    **mask: Any,
) -> SdpaFwd:
    """A plan over specs for a named target: no memory, no GPU."""
    h_q, h_kv = heads
    act_dtype = torch.bfloat16 if dtype == CODES else dtype
    q, o, gate = (
        TensorSpec.contiguous((b, s, h_q, d_head), one)
        for one in (dtype, o_dtype or act_dtype, act_dtype)
    )
    k = TensorSpec.contiguous((b, s if sk is None else sk, h_kv, d_head), dtype)
    return SdpaFwd(
        q,
        k,
        k,
        o,
        SdpaGeometry(h_q, h_kv, d_head, **mask),
        sample_gate=gate if has_gate else None,
        return_lse=has_lse,
        seq_lens_present=has_seq_lens,
        target=target,
        engines=engines,
        **scales_of(dtype, o_dtype),
    )
