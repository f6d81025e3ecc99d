# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the Conv3D family on one frame, at its exact rounding points.

Everything works on a single ``[H, W, C]`` frame, so that the bits of a frame cannot depend on how
many frames the call holds: a clip gives the same bits in any chunking. The arithmetic is FP32, and
``B`` rounds to BF16.
"""

from __future__ import annotations

import math

import torch

from cudnn_blocks.geometry.conv3d import KERNEL

NORM_FLOOR = 1e-12
"""Smallest L2 norm that a row is divided by."""


def convolve_frame(planes: torch.Tensor, taps: torch.Tensor, zero_planes: int = 0) -> torch.Tensor:
    """``B(sum over taps of planes x taps)`` with FP32 accumulation, tap by tap in T, R, S order.

    Operands are BF16 values, so their products are exact in FP32 and integer data gives exact sums.

    Args:
        planes: ``[3, H, W, Ci]`` BF16, the three input planes of one output frame.
        taps: ``[27, Ci, Co]`` FP32.
        zero_planes: leading planes that count as zero and are never read.

    Returns:
        ``[H-2, W-2, Co]`` BF16.
    """
    height, width = planes.shape[1] - 2, planes.shape[2] - 2
    kernel_t, kernel_r, kernel_s = KERNEL
    in_channels, out_channels = taps.shape[1:]
    total = torch.zeros(height * width, out_channels, dtype=torch.float32, device=planes.device)
    for t in range(min(zero_planes, kernel_t), kernel_t):
        plane = planes[t].float()
        for r in range(kernel_r):
            for s in range(kernel_s):
                rows = plane[r : r + height, s : s + width].reshape(-1, in_channels)
                total.addmm_(rows, taps[(t * kernel_r + r) * kernel_s + s])
    return total.view(height, width, out_channels).bfloat16()


def add_rounded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``B(float(x) + float(y))``."""
    return (x.float() + y.float()).bfloat16()


def pre_norm_value(
    frame: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    residual_bias: torch.Tensor | None,
) -> torch.Tensor:
    """``B(B(frame + bias) + B(residual + residual_bias))`` of what is given, never reassociated."""
    value = frame if bias is None else add_rounded(frame, bias)
    if residual is None:
        return value
    skip = residual if residual_bias is None else add_rounded(residual, residual_bias)
    return add_rounded(value, skip)


def normalize_activate(value: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """L2-normalises every row, scales by sqrt(C) and gamma, applies SiLU; each step rounds.

    ``x = B(value / max(sqrt(sum(value**2)), 1e-12))``, ``x = B(x * sqrt(C))``,
    ``x = B(x * gamma)``, ``B(x / (1 + exp(-x)))``. A NaN makes its own row NaN, and no other row.

    Args:
        value: ``[..., C]`` BF16.
        gamma: ``[C]`` BF16.

    Returns:
        BF16 of the shape of ``value``.
    """
    wide = value.float()
    denominator = wide.square().sum(dim=-1, keepdim=True).sqrt().clamp_min(NORM_FLOOR)
    normalized = (wide / denominator).bfloat16()
    scaled = (normalized.float() * math.sqrt(value.shape[-1])).bfloat16()
    affine = (scaled.float() * gamma.float()).bfloat16().float()
    return (affine / (1.0 + torch.exp(-affine))).bfloat16()
