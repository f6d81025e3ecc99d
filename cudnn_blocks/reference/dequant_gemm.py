# SPDX-License-Identifier: Apache-2.0
"""The matrix product with block-scaled weights in plain torch, at its rounding points."""

from __future__ import annotations

import torch

from cudnn_blocks.quant_spec import BlockFormat
from cudnn_blocks.reference.gated_attention_precision import values_of
from cudnn_blocks.reference.gemm import gemm


def dequant_gemm(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    w: torch.Tensor,
    w_sf: torch.Tensor,
    y: torch.Tensor,
    alpha: float,
    x_format: BlockFormat | None,
    w_format: BlockFormat,
) -> None:
    """``y = B(alpha * x @ W.T)``: codes become BF16 values, sums are FP32.

    Args:
        x: ``[B, S, K]``, BF16, or codes of ``x_format``.
        x_sf: the scale blob of x's rows, or None.
        w: ``[N, K]`` codes, two to a byte in e2m1.
        w_sf: the scale blob of w.
        y: ``[B, S, N]``, BF16, written.
        alpha: factor of the sums.
        x_format: None for BF16 values.
        w_format: of w.
    """
    if x_format is not None:
        assert x_sf is not None
        x = values_of(x, x_sf, x_format)
    gemm(x, values_of(w, w_sf, w_format), y, alpha)
