# SPDX-License-Identifier: Apache-2.0
"""Steps of the block's precision modes in plain torch that are made of several others."""

from __future__ import annotations

import torch

from cudnn_blocks.quant_spec import BlockFormat
from cudnn_blocks.reference.gemm import product
from cudnn_blocks.reference.qk_norm_rope import norm_and_rotate
from cudnn_blocks.reference.quantize import dequantize_block, quantize_fp8


def values_of(codes: torch.Tensor, blob: torch.Tensor, block: BlockFormat) -> torch.Tensor:
    """The BF16 values of ``[..., K]`` block-scaled rows under one blob."""
    *outer, width = codes.shape
    k = width * block.codes_per_byte
    rows = codes.numel() // width
    values = torch.empty((1, rows, 1, k), dtype=torch.bfloat16, device=codes.device)
    dequantize_block(codes.reshape(1, -1, 1, width), blob, values, block)
    return values.view(*outer, k)


def fp8_projection(
    h: torch.Tensor,
    w: torch.Tensor,
    q8: torch.Tensor,
    k8: torch.Tensor,
    v8: torch.Tensor,
    gate: torch.Tensor,
    w_q_norm: torch.Tensor | None,
    w_k_norm: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    eps: float,
    alpha: float,
    scale_q: float,
    scale_k: float,
    scale_v: float,
) -> None:
    """The projection of codes; its FP32 sums are normed, rotated and become e4m3 at once."""
    heads = (q8.shape[2], gate.shape[2], k8.shape[2], v8.shape[2])
    slab = product(h, w) * alpha
    q, g, k, v = slab.unflatten(-1, (sum(heads), -1)).split(heads, dim=2)
    quantize_fp8(norm_and_rotate(q, w_q_norm, cos, sin, eps), q8, scale_q)
    quantize_fp8(norm_and_rotate(k, w_k_norm, cos, sin, eps), k8, scale_k)
    quantize_fp8(v, v8, scale_v)
    gate.copy_(g)
