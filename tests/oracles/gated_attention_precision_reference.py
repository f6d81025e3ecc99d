# SPDX-License-Identifier: Apache-2.0
"""The precision modes of the block, written from its contract page: FP64 on dequantised operands.

It shares no line with the package. ``Points`` says which values are rounded and how; without any,
the result is the exact layer of the dequantised operands. Codes are decoded and made here from
their definitions: a code is a significand of ``bits`` bits times a power of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks import GatedAttentionGeometry
from tests.oracles.gated_attention_reference import norm_and_rotate, visible_keys

Round = Callable[[torch.Tensor], torch.Tensor]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AMAX_FACTOR = {448.0: 1 / 448, 6.0: 1 / 6}


def round_to_float(x: torch.Tensor, bits: int, min_exponent: int, largest: float) -> torch.Tensor:
    """Nearest value with ``bits`` bits behind the point, ties to even; saturates, keeps NaN."""
    x = x.double()
    _, exponent = torch.frexp(x)  # |x| = m * 2**exponent, m in [1/2, 1)
    quantum = torch.exp2((exponent - 1).clamp(min=min_exponent).double() - bits)
    return (torch.round(x / quantum) * quantum).clamp(-largest, largest)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Value of the nearest e4m3 code, saturating."""
    return round_to_float(x, 3, -6, 448.0)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """Value of the nearest e2m1 code, saturating."""
    return round_to_float(x, 1, 0, 6.0)


def bf16(x: torch.Tensor) -> torch.Tensor:
    """To BF16, by way of FP32 as kernels do it."""
    return x.float().bfloat16().double()


def after_bf16(codes: Round) -> Round:
    """Codes of BF16 values."""
    return lambda x: codes(bf16(x))


def per_tensor(scale: float) -> Round:
    """Code of x times scale, and back."""
    factor = torch.tensor(scale, dtype=torch.float32)
    return lambda x: e4m3(x.float() * factor) / factor.double()


def block_scales(amax: torch.Tensor, largest: float, *, has_e8m0: bool) -> torch.Tensor:
    """Scale of blocks of this largest magnitude; 0 stands for the smallest E8M0."""
    target = (amax.float() * torch.tensor(AMAX_FACTOR[largest], dtype=torch.float32)).double()
    if not has_e8m0:
        return e4m3(target.clamp(min=2.0**-9))
    mantissa, exponent = torch.frexp(target.clamp(min=2.0**-127))
    power = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(max=127)
    return torch.where(target.isnan(), target, torch.exp2(power.double()))


def block_scaled(codes: Round, block: int, largest: float, *, has_e8m0: bool) -> Round:
    """Codes along the last axis under one scale a block, and back."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        rest = -x.shape[-1] % block
        padded = torch.nn.functional.pad(x.double(), (0, rest)).unflatten(-1, (-1, block))
        scale = block_scales(padded.abs().amax(-1, keepdim=True), largest, has_e8m0=has_e8m0)
        return (codes(padded / scale) * scale).flatten(-2)[..., : x.shape[-1]]

    return apply


FORMATS: dict[str, Round] = {
    "mxfp8": block_scaled(e4m3, 32, 448.0, has_e8m0=True),
    "mxfp4": block_scaled(e2m1, 32, 6.0, has_e8m0=True),
    "nvfp4": block_scaled(e2m1, 16, 6.0, has_e8m0=False),
}


@dataclass(frozen=True)
class Points:
    """What is rounded, in the order of the computation."""

    slab: Round = torch.Tensor.double
    """The projection, all bands."""
    gate: Round = torch.Tensor.double
    normed: Round = torch.Tensor.double
    """Q and K after norm and rotation."""
    q: Round = torch.Tensor.double
    k: Round = torch.Tensor.double
    v: Round = torch.Tensor.double
    """Of ``[..., D]``; block-scaled values are rounded along S, ``v_along_keys``."""
    v_along_keys: bool = False
    weights: Round = torch.Tensor.double
    """Of exp(score - the largest of the row)."""
    o: Round = torch.Tensor.double
    """Attention output, and again with its gate."""
    coded_o: Round = torch.Tensor.double
    """Rows ``[..., h_q * D]`` that the out projection takes."""


def stated_points(precision: str, *, fused: bool, scales: dict[str, float]) -> Points:
    """The rounding points of a mode: ``fp8``, ``mxfp8``, ``nvfp4`` or ``mxfp4`` for the output.

    Fused, codes per tensor are made of unrounded values, block-scaled ones of BF16 values.
    """
    if precision == "fp8":
        q, k, v = (per_tensor(scales[f"scale_{name}"]) for name in "qkv")
        weights = per_tensor(256.0)
    else:
        q = k = FORMATS["mxfp8"]
        v = after_bf16(FORMATS["mxfp8"])
        weights = bf16
    has_fp4 = precision in ("nvfp4", "mxfp4")
    return Points(
        slab=torch.Tensor.double if fused else bf16,
        gate=bf16,
        normed=torch.Tensor.double if fused and precision == "fp8" else bf16,
        q=q,
        k=k,
        v=v,
        v_along_keys=precision != "fp8",
        weights=weights,
        o=bf16,
        coded_o=FORMATS[precision] if has_fp4 else per_tensor(scales["scale_o"]),
    )


def gated_attention(
    h: torch.Tensor,
    w_qkvg: torch.Tensor,
    w_q_norm: torch.Tensor | None,
    w_k_norm: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    w_o: torch.Tensor,
    geometry: GatedAttentionGeometry,
    seq_lens: list[int] | None = None,
    points: Points | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``out [B, S, d_model]``, not rounded, and LSE ``[B, h_q, S]``; operands are real values."""
    at = points or Points()
    b, s, _ = h.shape
    h_q, h_kv, d = geometry.h_q, geometry.h_kv, geometry.d_head
    slab = at.slab(h.double() @ w_qkvg.double().T)
    widths = [h_q * d, h_q * d, h_kv * d, h_kv * d]
    q, gate, k, v = (band.reshape(b, s, -1, d) for band in torch.split(slab, widths, dim=-1))
    gate = at.gate(gate)
    q = at.q(at.normed(norm_and_rotate(q, w_q_norm, cos, sin, geometry)))
    k = at.k(at.normed(norm_and_rotate(k, w_k_norm, cos, sin, geometry)))
    lengths = [s] * b if seq_lens is None else [min(max(length, 0), s) for length in seq_lens]
    o = torch.zeros(b, s, h_q, d, dtype=torch.float64)
    lse = torch.full((b, h_q, s), -math.inf, dtype=torch.float64)
    for entry, length in enumerate(lengths):
        values = v[entry, :length]
        values = at.v(values.transpose(0, -1)).transpose(0, -1) if at.v_along_keys else at.v(values)
        for row in range(s):
            keys = visible_keys(geometry, row, s, length)
            if not keys:
                continue
            heads = torch.arange(h_q) // (h_q // h_kv)
            scores = torch.einsum("khd,hd->hk", k[entry, keys][:, heads], q[entry, row])
            scores = scores * geometry.scale
            top = scores.amax(1, keepdim=True)
            p = torch.exp(scores - top)
            total = p.sum(1, keepdim=True)
            lse[entry, :, row] = (top + total.log())[:, 0]
            o[entry, row] = (
                torch.einsum("hk,khd->hd", at.weights(p), values[keys][:, heads]) / total
            )
    o = at.o(at.o(o) / (1 + torch.exp(-gate)))
    return at.coded_o(o.flatten(2)) @ w_o.double().T, lse


def blob_offset(row: Any, column: Any, columns: int) -> Any:
    """Bytes of scales in a blob of tiles of 128 rows and 4 columns; numbers or tensors."""
    tile = row // 128 * (-(-columns // 4)) + column // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def make_blob(scale_bytes: torch.Tensor, pad: int = 0) -> torch.Tensor:
    """The blob of ``[rows, columns]`` bytes, padding included."""
    rows, columns = scale_bytes.shape
    size = -(-rows // 128) * 128 * (-(-columns // 4) * 4)
    blob = torch.full((size,), pad, dtype=torch.uint8)
    places = blob_offset(torch.arange(rows)[:, None], torch.arange(columns)[None, :], columns)
    blob[places.flatten()] = scale_bytes.flatten()
    return blob
