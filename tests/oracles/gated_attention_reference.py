# SPDX-License-Identifier: Apache-2.0
"""The gated attention block, written from its contract page: FP64, one visible key at a time.

It shares no line with the package. FP64 stands for FP32, whose own rounding is far below that of
the activation dtype; where the page says ``A(x)``, values are rounded to the activation dtype.
``online_attention`` is the sequential emulation of a flash-style kernel: blocks of keys, a running
maximum, weights rounded before they meet V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from cudnn_blocks import GatedAttentionGeometry


@dataclass(frozen=True)
class Expected:
    """FP64 results: the last two before their final rounding, the others as stored."""

    q: torch.Tensor
    """``[B, S, h_q, D]`` after norm and rotation."""
    k: torch.Tensor
    gate: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    """Before the gate, rounded."""
    gated: torch.Tensor
    lse: torch.Tensor
    """``[B, h_q, S]``."""
    out: torch.Tensor
    """``[B, S, d_model]``, not rounded."""


def visible_keys(
    geometry: GatedAttentionGeometry, row: int, num_rows: int, length: int
) -> list[int]:
    """The keys that a query row sees, by the three lines of the page."""
    offset = length - num_rows if geometry.causal_bottom_right else 0
    diagonal, keys = row + offset, []
    for key in range(length):
        if geometry.is_causal and key > diagonal + max(geometry.window_right, 0):
            continue
        if geometry.window_left >= 0 and key < diagonal - geometry.window_left:
            continue
        keys.append(key)
    return keys


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
    *,
    fuse_norm_rope: bool = False,
) -> Expected:
    """The whole block."""
    dtype = h.dtype

    def act(x: torch.Tensor) -> torch.Tensor:
        return x.float().to(dtype).double()

    b, s, _ = h.shape
    h_q, h_kv, d = geometry.h_q, geometry.h_kv, geometry.d_head
    exact = torch.matmul(h.double(), w_qkvg.double().T)
    widths = [h_q * d, h_q * d, h_kv * d, h_kv * d]
    q, gate, k, v = (band.reshape(b, s, -1, d) for band in torch.split(exact, widths, dim=-1))
    gate, v = act(gate), act(v)
    if not fuse_norm_rope:
        q, k = act(q), act(k)
    q = act(norm_and_rotate(q, w_q_norm, cos, sin, geometry))
    k = act(norm_and_rotate(k, w_k_norm, cos, sin, geometry))
    lengths = [s] * b if seq_lens is None else [min(max(length, 0), s) for length in seq_lens]
    o = torch.zeros(b, s, h_q, d, dtype=torch.float64)
    lse = torch.full((b, h_q, s), -math.inf, dtype=torch.float64)
    for entry, length in enumerate(lengths):
        for row in range(s):
            keys = visible_keys(geometry, row, s, length)
            for head in range(h_q) if keys else ():
                kv_head = head // (h_q // h_kv)
                scores = k[entry, keys, kv_head] @ q[entry, row, head] * geometry.scale
                lse[entry, head, row] = torch.logsumexp(scores, 0)
                o[entry, row, head] = torch.softmax(scores, 0) @ v[entry, keys, kv_head]
    o = act(o)
    gated = act(o / (1 + torch.exp(-gate)))
    out = gated.reshape(b, s, h_q * d) @ w_o.double().T
    return Expected(q, k, gate, v, o, gated, lse, out)


def norm_and_rotate(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    geometry: GatedAttentionGeometry,
) -> torch.Tensor:
    """``[B, S, H, D]``, not rounded; rotation as a complex product of channels i and i + R/2."""
    if geometry.qk_norm:
        mean_square = (x * x).sum(-1, keepdim=True) / geometry.d_head
        x = x / torch.sqrt(mean_square + geometry.qk_norm_eps) * weight.double()
    half = geometry.rope_dim // 2
    if half == 0:
        return x
    s = x.shape[1]
    rotated = x.clone()
    for i in range(half):
        low, high = x[..., i], x[..., i + half]
        for channel, one, other, sign in ((i, low, high, -1), (i + half, high, low, 1)):
            c = cos[:, :s, channel].double().unsqueeze(-1)
            t = sin[:, :s, channel].double().unsqueeze(-1)
            rotated[..., channel] = one * c + sign * other * t
    return rotated


def online_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    visible: torch.Tensor,
    block: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One head as a flash-style kernel takes it: ``[S, D]`` each, ``visible`` ``[S, Sk]``.

    FP32 scores and sums, a running maximum per row, weights rounded to ``dtype`` before the product
    with V, the rounded result and the natural-log LSE.
    """
    num_rows = q.shape[0]
    top = torch.full((num_rows,), -math.inf)
    total = torch.zeros(num_rows)
    acc = torch.zeros(num_rows, v.shape[1])
    for start in range(0, k.shape[0], block):
        keys = slice(start, start + block)
        scores = (q.float() @ k[keys].float().T) * scale
        scores = scores.masked_fill(~visible[:, keys], -math.inf)
        new_top = torch.maximum(top, scores.amax(1))
        base = torch.where(new_top == -math.inf, 0.0, new_top)
        weights = torch.exp(scores - base[:, None])
        shrink = torch.exp(top - base)
        total = total * shrink + weights.sum(1)
        acc = acc * shrink[:, None] + weights.to(dtype).float() @ v[keys].float()
        top = new_top
    dead = total == 0
    o = torch.where(dead[:, None], 0.0, acc / torch.where(dead, 1.0, total)[:, None])
    lse = torch.where(dead, -math.inf, top + torch.log(total))
    return o.to(dtype), lse
