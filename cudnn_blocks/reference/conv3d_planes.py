# SPDX-License-Identifier: Apache-2.0
"""Which planes and frames the ops of the Conv3D family write, and the checks before they do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.conv3d import MAX_HISTORY_FRAMES
from cudnn_blocks.geometry.conv3d_shapes import check_shapes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cudnn_blocks.geometry.conv3d import Shape


def check_tensors(shapes: dict[str, Shape], **tensors: torch.Tensor | None) -> None:
    """Raises ContractError at the first tensor whose presence, shape or dtype is wrong."""
    check_shapes(shapes, {name: None if x is None else x.shape for name, x in tensors.items()})
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != torch.bfloat16:
            raise ContractError(name, f"dtype {torch.bfloat16}", tensor.dtype)


def frame_indices(activation: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yields every ``(n, t)`` of an ``[N, T, ...]`` tensor."""
    for n in range(activation.shape[0]):
        for t in range(activation.shape[1]):
            yield n, t


def frame_of(tensor: torch.Tensor | None, n: int, t: int) -> torch.Tensor | None:
    """Returns frame ``(n, t)`` of an optional tensor."""
    return None if tensor is None else tensor[n, t]


def zero_around_frames(padded_output: torch.Tensor, history_frames: int) -> None:
    """Zeroes the borders of all planes and the leading planes that hold no history."""
    padded_output[:, : MAX_HISTORY_FRAMES - history_frames].zero_()
    for edge in (0, -1):
        padded_output[:, :, edge].zero_()
        padded_output[:, :, :, edge].zero_()


def write_activated(
    activated: torch.Tensor, padded_output: torch.Tensor, cache_output: torch.Tensor, n: int, t: int
) -> None:
    """Writes current frame ``t`` into its padded plane and, if among the last, the cache tail."""
    padded_output[n, MAX_HISTORY_FRAMES + t, 1:-1, 1:-1] = activated
    frames = padded_output.shape[1] - MAX_HISTORY_FRAMES
    cache_index = t - frames + cache_output.shape[1]
    if cache_index >= 0:
        cache_output[n, cache_index] = activated


def carry_old_frames(previous: torch.Tensor, cache_output: torch.Tensor, frames: int) -> None:
    """Copies the last frames of ``previous`` for which ``frames`` new ones leave room."""
    old = max(cache_output.shape[1] - frames, 0)
    if old:
        cache_output[:, :old] = previous[:, -old:]
