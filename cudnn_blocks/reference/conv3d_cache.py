# SPDX-License-Identifier: Apache-2.0
"""The cache-carrying ops of the Conv3D family in plain torch: specification, CPU engine and oracle.

The rules of :mod:`cudnn_blocks.reference.conv3d` hold here too. Both ops copy the history that
they are given and keep the last frames for the next chunk; the fused convolutions leave the old
frames to the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudnn_blocks.geometry.conv3d import (
    KERNEL,
    MAX_HISTORY_FRAMES,
    CausalConv3dGeometry,
    RmsNormSiluGeometry,
)
from cudnn_blocks.geometry.conv3d_shapes import (
    ResidualMode,
    causal_conv3d_with_cache_shapes,
    rmsnorm_silu_pad_shapes,
)
from cudnn_blocks.reference.conv3d_frame import convolve_frame, normalize_activate, pre_norm_value
from cudnn_blocks.reference.conv3d_packing import causal_conv3d_taps
from cudnn_blocks.reference.conv3d_planes import (
    carry_old_frames,
    check_tensors,
    frame_indices,
    frame_of,
    write_activated,
    zero_around_frames,
)

if TYPE_CHECKING:
    import torch


def rmsnorm_silu_pad(
    input: torch.Tensor,
    gamma: torch.Tensor,
    padded_output: torch.Tensor,
    cache_output: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    residual_output: torch.Tensor | None = None,
) -> None:
    """The post-operations on an existing activation; copies the already activated history."""
    geometry = RmsNormSiluGeometry.from_shapes(input.shape)
    shapes = rmsnorm_silu_pad_shapes(
        geometry,
        input.shape,
        ResidualMode.of(residual, residual_bias, residual_output),
        has_input_bias=input_bias is not None,
        previous_shape=None if previous is None else previous.shape,
    )
    check_tensors(
        shapes,
        input=input,
        gamma=gamma,
        padded_output=padded_output,
        cache_output=cache_output,
        input_bias=input_bias,
        previous=previous,
        residual=residual,
        residual_bias=residual_bias,
        residual_output=residual_output,
    )
    frames = input.shape[1]
    zero_around_frames(padded_output, 0)
    if previous is not None:
        first = MAX_HISTORY_FRAMES - previous.shape[1]
        padded_output[:, first:MAX_HISTORY_FRAMES, 1:-1, 1:-1] = previous
        carry_old_frames(previous, cache_output, frames)
    for n, t in frame_indices(input):
        value = pre_norm_value(input[n, t], input_bias, frame_of(residual, n, t), residual_bias)
        if residual_output is not None:
            residual_output[n, t] = value
        write_activated(normalize_activate(value, gamma), padded_output, cache_output, n, t)


def causal_conv3d_with_cache(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    padded_input: torch.Tensor | None,
    cache_output: torch.Tensor,
    output: torch.Tensor,
    previous: torch.Tensor | None = None,
) -> None:
    """Packs history and chunk into ``padded_input``, convolves it, and keeps the raw history.

    ``padded_input`` may be None; then the scratch is allocated here. Missing history is zero.
    """
    geometry = CausalConv3dGeometry()
    shapes = causal_conv3d_with_cache_shapes(
        geometry,
        input.shape,
        has_padded_input=padded_input is not None,
        previous_shape=None if previous is None else previous.shape,
    )
    check_tensors(
        shapes,
        input=input,
        packed_weight=packed_weight,
        padded_input=padded_input,
        cache_output=cache_output,
        output=output,
        previous=previous,
    )
    if padded_input is None:
        padded_input = input.new_empty(geometry.padded_input_shape(input.shape))
    frames, channels = input.shape[2], geometry.in_channels
    chunk = input.permute(0, 2, 3, 4, 1)
    padded_input.zero_()
    padded_input[:, MAX_HISTORY_FRAMES:, 1:-1, 1:-1, :channels] = chunk
    if previous is not None:
        first = MAX_HISTORY_FRAMES - previous.shape[1]
        padded_input[:, first:MAX_HISTORY_FRAMES, 1:-1, 1:-1, :channels] = previous
        carry_old_frames(previous, cache_output, frames)
    kept = min(MAX_HISTORY_FRAMES, frames)
    cache_output[:, -kept:] = chunk[:, -kept:]
    taps = causal_conv3d_taps(packed_weight, channels)
    for n, t in frame_indices(output):
        output[n, t] = convolve_frame(padded_input[n, t : t + KERNEL[0], ..., :channels], taps)
