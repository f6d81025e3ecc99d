# SPDX-License-Identifier: Apache-2.0
"""QK-RMSNorm and partial rotate-half RoPE in plain torch, at the contract's rounding points."""

from __future__ import annotations

import torch


def norm_and_rotate(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Norm, then rotation, of ``[B, S, H, D]`` in FP32, not rounded.

    Args:
        x: any dtype; taken as FP32.
        weight: ``[D]``, or None for no norm.
        cos: ``[B, S_table, rope_dim]`` with ``S_table >= S``, or None for no rotation.
        sin: as cos.
        eps: added to the mean square.
    """
    x = x.float()
    if weight is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    if cos is None or sin is None or cos.shape[-1] == 0:
        return x
    rope_dim, rows = cos.shape[-1], x.shape[1]
    cos, sin = (table[:, :rows, None].float() for table in (cos, sin))
    first, second = x[..., :rope_dim].chunk(2, dim=-1)
    turned = x[..., :rope_dim] * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, x[..., rope_dim:]), dim=-1)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    w_q_norm: torch.Tensor | None,
    w_k_norm: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
) -> None:
    """Norm and rotation of Q and K in place, rounded once.

    Without norm weights the channels past ``rope_dim`` are not written.
    """
    for x, weight in ((q, w_q_norm), (k, w_k_norm)):
        written = x.shape[-1] if weight is not None else 0 if cos is None else cos.shape[-1]
        x[..., :written].copy_(norm_and_rotate(x, weight, cos, sin, eps)[..., :written])
