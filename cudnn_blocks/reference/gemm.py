# SPDX-License-Identifier: Apache-2.0
"""Matrix products of the projections in plain torch, at the contract's rounding points."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cudnn_blocks.reference.qk_norm_rope import norm_and_rotate


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``sum over k of float(x[..., k]) * float(w[n, k])`` in FP32, not rounded.

    Products of 16-bit values and of codes are exact in FP32, so integer data gives exact sums up to
    2**24.
    """
    return x.float() @ w.float().t()


def gemm(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, alpha: float = 1.0) -> None:
    """``y = A(alpha * x @ w.T)``, one rounding to y's dtype after that of the FP32 product.

    Args:
        x: ``[B, S, K]``.
        w: ``[N, K]``.
        y: ``[B, S, N]``, written.
        alpha: factor of the sums.
    """
    y.copy_(product(x, w) * alpha)


def gemm_norm_rope(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    norm_rope: Sequence[torch.Tensor | None],
    eps: float,
    heads: tuple[int, int, int, int],
) -> None:
    """The projection slab with norm and rotation of Q and K on the FP32 sums, rounded once.

    Args:
        x: ``[B, S, K]``.
        w: ``[N, K]``, rows in bands ``Q | GATE | K | V``.
        y: ``[B, S, N]``, written.
        norm_rope: w_q_norm and w_k_norm ``[D]``, or None for no norm; cos and sin
            ``[B, T, rope_dim]`` with T >= S, or None for no rotation.
        eps: added to the mean square.
        heads: of the bands, in their order.
    """
    w_q_norm, w_k_norm, cos, sin = norm_rope
    slab = product(x, w)
    q, gate, k, v = slab.unflatten(-1, (sum(heads), -1)).split(heads, dim=2)
    q = norm_and_rotate(q, w_q_norm, cos, sin, eps)
    k = norm_and_rotate(k, w_k_norm, cos, sin, eps)
    y.copy_(torch.cat((q, gate, k, v), dim=2).flatten(2))
