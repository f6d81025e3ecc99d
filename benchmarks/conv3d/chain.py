# SPDX-License-Identifier: Apache-2.0
"""The layers as a torch user writes them, on NTHWC tensors: eager and under torch.compile."""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from cudnn_blocks.geometry.conv3d import MAX_HISTORY_FRAMES


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A valid convolution of ``[N, T, H, W, Ci]`` by ``[Co, Ci, 3, 3, 3]``, both channels last."""
    return functional.conv3d(x.permute(0, 4, 1, 2, 3), weight, bias).permute(0, 2, 3, 4, 1)


def normalize_pad(
    value: torch.Tensor, gamma: torch.Tensor, history: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """L2 norm over channels, scale, SiLU; history before it, a zero border around it, the cache."""
    scale = math.sqrt(value.shape[-1])
    activated = functional.silu(functional.normalize(value, dim=-1) * scale * gamma)
    frames = activated if history is None else torch.cat([history, activated], dim=1)
    missing = MAX_HISTORY_FRAMES - (0 if history is None else history.shape[1])
    return {
        "padded_output": functional.pad(frames, (0, 0, 1, 1, 1, 1, missing, 0)),
        "cache_output": frames[:, -MAX_HISTORY_FRAMES:].clone(
            memory_format=torch.contiguous_format
        ),
    }


def post_operations(
    value: torch.Tensor,
    gamma: torch.Tensor,
    residual: torch.Tensor | None,
    history: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The residual sum, which is kept where there is one, and ``normalize_pad`` of it."""
    if residual is None:
        return normalize_pad(value, gamma, history)
    value = value + residual
    return normalize_pad(value, gamma, history) | {"residual_output": value}


def fused_layer(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    gamma: torch.Tensor,
    residual: torch.Tensor | None,
    history: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Convolution, bias, residual, norm, SiLU and padding."""
    return post_operations(convolve(x, weight, bias), gamma, residual, history)


def causal_layer(
    chunk: torch.Tensor, weight: torch.Tensor, previous: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """History before an NCTHW chunk, zeros around both, the convolution, and the raw cache."""
    frames = chunk.permute(0, 2, 3, 4, 1)
    if previous is not None:
        frames = torch.cat([previous, frames], dim=1)
    missing = MAX_HISTORY_FRAMES - (0 if previous is None else previous.shape[1])
    padded = functional.pad(frames, (0, 0, 1, 1, 1, 1, missing, 0)).contiguous()
    return {
        "output": convolve(padded, weight),
        "cache_output": frames[:, -MAX_HISTORY_FRAMES:].clone(
            memory_format=torch.contiguous_format
        ),
    }
