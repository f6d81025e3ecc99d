# SPDX-License-Identifier: Apache-2.0
"""Operands of one matrix product or fused projection, and what has to come out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from cudnn_blocks import GatedAttentionGeometry, Gemm, QkvGateProjection, TensorSpec
from cudnn_blocks.reference import gemm as reference
from tests.helpers.pointwise_problem import make_tables
from tests.helpers.tensors import clone_exact

Operands = dict[str, torch.Tensor | None]
DTYPES = (torch.bfloat16, torch.float16)
ULP_OF_ONE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@dataclass(frozen=True)
class GemmProblem:
    """One call of Gemm, or of QkvGateProjection where there is a geometry."""

    operands: Operands
    geometry: GatedAttentionGeometry | None = None
    fuse_norm_rope: bool = False

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.operands[name]
        assert tensor is not None, name
        return tensor

    @property
    def result(self) -> torch.Tensor:
        return self["y" if self.geometry is None else "proj"]

    def plan(self, **knobs: Any) -> Gemm | QkvGateProjection:
        samples = {f"sample_{name}": tensor for name, tensor in self.operands.items()}
        return self.plan_of(samples, **knobs)

    def plan_of(self, samples: dict[str, Any], **knobs: Any) -> Gemm | QkvGateProjection:
        if self.geometry is None:
            return Gemm(**samples, **knobs)
        knobs["fuse_norm_rope"] = self.fuse_norm_rope
        return QkvGateProjection(**samples, geometry=self.geometry, **knobs)

    def run(self, plan: Gemm | QkvGateProjection | None = None, **knobs: Any) -> GemmProblem:
        if plan is None:
            plan = self.plan(**knobs)
            plan.compile()
        plan.execute(**self.operands)
        return self

    def clone(self) -> GemmProblem:
        """Every operand in memory of its own, strides kept; expanded tables stay as they are."""
        copies = {
            n: t if t is None or 0 in t.stride() else clone_exact(t)
            for n, t in self.operands.items()
        }
        return replace(self, operands=copies)

    def with_(self, **operands: torch.Tensor | None) -> GemmProblem:
        return replace(self, operands={**self.operands, **operands})

    def expected(self) -> torch.Tensor:
        """The result by the reference, on the operands' device."""
        one, done = self.geometry, torch.empty_like(self.result)
        x, w, _, *small = self.operands.values()
        assert x is not None
        assert w is not None
        if one is None or not self.fuse_norm_rope:
            reference.gemm(x, w, done)
        else:
            reference.gemm_norm_rope(x, w, done, small, one.qk_norm_eps, one.qkvg_heads)
        return done

    def check(self, actual: torch.Tensor | None = None, *, is_exact: bool = True) -> None:
        """Raises unless the result is the reference's.

        With exact data nothing but a rounding of the norm and rotation may differ, and only in the
        bands that they reach.
        """
        actual, expected = self.result if actual is None else actual, self.expected()
        if is_exact and not self.fuse_norm_rope:
            assert torch.equal(actual, expected)
            return
        ulp = ULP_OF_ONE[actual.dtype]
        torch.testing.assert_close(actual, expected, rtol=ulp, atol=ulp / 32, equal_nan=True)
        if is_exact:
            assert (actual != expected).double().mean() < 1e-3
            _, gate, _, v = self.bands(actual)
            _, expected_gate, _, expected_v = self.bands(expected)
            assert torch.equal(gate, expected_gate)
            assert torch.equal(v, expected_v)

    def bands(self, slab: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self.geometry is not None
        return slab.split(self.geometry.qkvg_block_widths, dim=-1)


def pitched(
    shape: tuple[int, ...], pad: int, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Rows ``pad`` elements apart, in NaN."""
    wide = torch.full((*shape[:-1], shape[-1] + pad), float("nan"), dtype=dtype, device=device)
    return wide[..., : shape[-1]]


def make_gemm(
    shape: tuple[int, int, int, int] = (2, 5, 24, 40),
    *,
    dtype: torch.dtype = torch.bfloat16,
    data: str = "integers",
    pads: tuple[int, int, int] = (0, 0, 0),
    device: torch.device | str = "cpu",
) -> GemmProblem:
    """Operands of Gemm.

    Args:
        shape: B, S, N, K.
        dtype: of every operand.
        data: ``integers``, whose sums are exact in FP32, or ``normal``.
        pads: elements between the rows of x, w and y.
        device: of every operand.
    """
    b, s, n, k = shape
    x = pitched((b, s, k), pads[0], dtype, device)
    w = pitched((n, k), pads[1], dtype, device)
    fill(x, w, data)
    return GemmProblem({"x": x, "w": w, "y": pitched((b, s, n), pads[2], dtype, device)})


def fill(x: torch.Tensor, w: torch.Tensor, data: str) -> None:
    if data == "integers":
        x.copy_(torch.randint(-3, 4, x.shape, device=x.device))
        w.copy_(torch.randint(-2, 3, w.shape, device=x.device))
    else:
        x.copy_(torch.randn(x.shape, device=x.device))
        w.copy_(torch.randn(w.shape, device=x.device) * w.shape[1] ** -0.5)


def make_projection(
    geometry: GatedAttentionGeometry,
    tokens: tuple[int, int] = (2, 5),
    *,
    dtype: torch.dtype = torch.bfloat16,
    data: str = "integers",
    pads: tuple[int, int] = (0, 0),
    fuse_norm_rope: bool = True,
    spare_rows: int = 3,
    is_expanded: bool = False,
    device: torch.device | str = "cpu",
) -> GemmProblem:
    """Operands of QkvGateProjection.

    Args:
        geometry: sizes and norm.
        tokens: B, S.
        dtype: of every operand.
        data: as in :func:`make_gemm`.
        pads: elements between the rows of h and of proj.
        fuse_norm_rope: knob.
        spare_rows: rows of the tables past S.
        is_expanded: the tables have batch stride 0.
        device: of every operand.
    """
    h = pitched((*tokens, geometry.d_model), pads[0], dtype, device)
    w_qkvg = torch.empty(geometry.n_qkvg, geometry.d_model, dtype=dtype, device=device)
    fill(h, w_qkvg, data)

    def weight() -> torch.Tensor | None:
        if not (fuse_norm_rope and geometry.qk_norm):
            return None
        return (1 + 0.3 * torch.randn(geometry.d_head)).to(device, dtype)

    rows, rope_dim = tokens[1] + spare_rows, geometry.rope_dim if fuse_norm_rope else 0
    cos, sin = make_tables(tokens[0], rows, rope_dim, dtype, is_expanded, device)
    operands = {
        "h": h,
        "w_qkvg": w_qkvg,
        "proj": pitched((*tokens, geometry.n_qkvg), pads[1], dtype, device),
        "w_q_norm": weight(),
        "w_k_norm": weight(),
        "cos": cos,
        "sin": sin,
    }
    return GemmProblem(operands, geometry, fuse_norm_rope)


def spec_gemm(
    shape: tuple[int, int, int, int], *, dtype: torch.dtype = torch.bfloat16, **knobs: Any
) -> Gemm:
    """A plan from specs."""
    b, s, n, k = shape
    shapes = ((b, s, k), (n, k), (b, s, n))
    return Gemm(*(TensorSpec.contiguous(of, dtype) for of in shapes), **knobs)


def spec_projection(
    geometry: GatedAttentionGeometry,
    tokens: tuple[int, int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    **knobs: Any,
) -> QkvGateProjection:
    """A plan with the norm and RoPE epilogue from specs."""

    def spec(*shape: int) -> TensorSpec:
        return TensorSpec.contiguous(shape, dtype)

    norm = spec(geometry.d_head) if geometry.qk_norm else None
    table = spec(*tokens, geometry.rope_dim) if geometry.rope_dim else None
    return QkvGateProjection(
        spec(*tokens, geometry.d_model),
        spec(geometry.n_qkvg, geometry.d_model),
        spec(*tokens, geometry.n_qkvg),
        geometry,
        sample_w_q_norm=norm,
        sample_w_k_norm=norm,
        sample_cos=table,
        sample_sin=table,
        fuse_norm_rope=True,
        **knobs,
    )
