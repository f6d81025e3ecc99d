# SPDX-License-Identifier: Apache-2.0
"""The gated attention block in plain torch: its stages' references, one after the other."""

from __future__ import annotations

import torch

from cudnn_blocks.geometry.gated_attention import GatedAttentionGeometry
from cudnn_blocks.reference.attention import AttentionMask, sdpa
from cudnn_blocks.reference.gemm import gemm, gemm_norm_rope
from cudnn_blocks.reference.qk_norm_rope import qk_norm_rope
from cudnn_blocks.reference.sigmoid_gate import sigmoid_gate


def gated_attention(
    h: torch.Tensor,
    w_qkvg: torch.Tensor,
    w_q_norm: torch.Tensor | None,
    w_k_norm: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    w_o: torch.Tensor,
    geometry: GatedAttentionGeometry,
    *,
    seq_lens: torch.Tensor | None = None,
    fuse_norm_rope: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``out [B, S, d_model]`` and LSE, FP32 ``[B, h_q, S]``.

    Operands are those of the block's contract page. ``fuse_norm_rope`` takes norm and rotation of
    the projection's FP32 sums; a fused gate has the same bits as the separate one.
    """
    one, (batch, tokens, _) = geometry, h.shape
    proj = h.new_empty((batch, tokens, one.n_qkvg))
    norm_rope = (w_q_norm, w_k_norm, cos, sin)
    q, gate, k, v = (
        band.unflatten(-1, (heads, one.d_head))
        for band, heads in zip(
            proj.split(one.qkvg_block_widths, dim=-1), one.qkvg_heads, strict=True
        )
    )
    if fuse_norm_rope:
        gemm_norm_rope(h, w_qkvg, proj, norm_rope, one.qk_norm_eps, one.qkvg_heads)
    else:
        gemm(h, w_qkvg, proj)
        qk_norm_rope(q, k, *norm_rope, one.qk_norm_eps)
    o, lse = torch.empty_like(q), q.new_empty((batch, one.h_q, tokens), dtype=torch.float32)
    mask = AttentionMask(one.is_causal, one.causal_bottom_right, one.window_left, one.window_right)
    sdpa(q, k, v, o, None, lse, seq_lens, one.scale, mask)
    sigmoid_gate(o, gate, o)
    out = torch.empty_like(h, memory_format=torch.contiguous_format)
    gemm(o.flatten(2), w_o, out)
    return out, lse
