# SPDX-License-Identifier: Apache-2.0
"""The convolving ops of the Conv3D family in plain torch: specification, CPU engine and oracle.

One function per op, with the operands in the order of the op's ``execute``. Each writes into
preallocated outputs exactly what the op writes and nothing else, on any device. Shapes and dtypes
are checked before anything is written; strides, alignment, overlap and grad mode are the op's
business.

``zero_leading_frames`` input planes are never read and count as zero, whatever they hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudnn_blocks.geometry.conv3d import KERNEL, Conv3dGeometry, check_zero_leading_frames
from cudnn_blocks.geometry.conv3d_shapes import (
    ResidualMode,
    conv3d_bias_residual_pad_shapes,
    conv3d_raw_shapes,
    conv3d_rmsnorm_silu_pad_shapes,
    conv3d_rmsnorm_silu_shapes,
)
from cudnn_blocks.reference.conv3d_frame import convolve_frame, normalize_activate, pre_norm_value
from cudnn_blocks.reference.conv3d_packing import conv3d_taps
from cudnn_blocks.reference.conv3d_planes import (
    check_tensors,
    frame_of,
    write_activated,
    zero_around_frames,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def conv3d_raw(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    output: torch.Tensor,
    *,
    zero_leading_frames: int = 0,
) -> None:
    """``output = B(Conv3D(input, packed_weight))``, a valid convolution without bias."""
    check_zero_leading_frames(zero_leading_frames)
    geometry = Conv3dGeometry.from_shapes(input.shape, packed_weight.shape)
    shapes = conv3d_raw_shapes(geometry, input.shape)
    check_tensors(shapes, input=input, packed_weight=packed_weight, output=output)
    for n, t, frame in _convolved(input, packed_weight, zero_leading_frames):
        output[n, t] = frame


def conv3d_rmsnorm_silu(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    gamma: torch.Tensor,
    output: torch.Tensor,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    residual_output: torch.Tensor | None = None,
    *,
    zero_leading_frames: int = 0,
) -> None:
    """Convolution, bias, optional residual, L2 normalisation and SiLU into a contiguous output."""
    check_zero_leading_frames(zero_leading_frames)
    geometry = Conv3dGeometry.from_shapes(input.shape, packed_weight.shape)
    shapes = conv3d_rmsnorm_silu_shapes(
        geometry,
        input.shape,
        ResidualMode.of(residual, residual_bias, residual_output),
    )
    check_tensors(
        shapes,
        input=input,
        packed_weight=packed_weight,
        bias=bias,
        gamma=gamma,
        output=output,
        residual=residual,
        residual_bias=residual_bias,
        residual_output=residual_output,
    )
    for n, t, frame in _convolved(input, packed_weight, zero_leading_frames):
        value = pre_norm_value(frame, bias, frame_of(residual, n, t), residual_bias)
        if residual_output is not None:
            residual_output[n, t] = value
        output[n, t] = normalize_activate(value, gamma)


def conv3d_rmsnorm_silu_pad(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    gamma: torch.Tensor,
    padded_output: torch.Tensor,
    cache_output: torch.Tensor,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    residual_output: torch.Tensor | None = None,
    *,
    history_frames: int = 0,
    zero_leading_frames: int = 0,
) -> None:
    """As :func:`conv3d_rmsnorm_silu`, into a padded output and the tail of the cache.

    The interiors of the last ``history_frames`` of the two leading planes, and the cache frames
    before the current ones, belong to the caller and are neither read nor written.
    """
    check_zero_leading_frames(zero_leading_frames)
    geometry = Conv3dGeometry.from_shapes(input.shape, packed_weight.shape)
    shapes = conv3d_rmsnorm_silu_pad_shapes(
        geometry,
        input.shape,
        ResidualMode.of(residual, residual_bias, residual_output),
        history_frames=history_frames,
    )
    check_tensors(
        shapes,
        input=input,
        packed_weight=packed_weight,
        bias=bias,
        gamma=gamma,
        padded_output=padded_output,
        cache_output=cache_output,
        residual=residual,
        residual_bias=residual_bias,
        residual_output=residual_output,
    )
    zero_around_frames(padded_output, history_frames)
    for n, t, frame in _convolved(input, packed_weight, zero_leading_frames):
        value = pre_norm_value(frame, bias, frame_of(residual, n, t), residual_bias)
        if residual_output is not None:
            residual_output[n, t] = value
        write_activated(normalize_activate(value, gamma), padded_output, cache_output, n, t)


def conv3d_bias_residual_pad(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    padded_output: torch.Tensor,
    residual_bias: torch.Tensor | None = None,
    *,
    zero_leading_frames: int = 0,
) -> None:
    """Convolution, bias and residual, with a zero bottom row and right column."""
    check_zero_leading_frames(zero_leading_frames)
    geometry = Conv3dGeometry.from_shapes(input.shape, packed_weight.shape)
    has_residual_bias = residual_bias is not None
    shapes = conv3d_bias_residual_pad_shapes(
        geometry, input.shape, has_residual_bias=has_residual_bias
    )
    check_tensors(
        shapes,
        input=input,
        packed_weight=packed_weight,
        bias=bias,
        residual=residual,
        padded_output=padded_output,
        residual_bias=residual_bias,
    )
    padded_output[:, :, -1].zero_()
    padded_output[:, :, :, -1].zero_()
    for n, t, frame in _convolved(input, packed_weight, zero_leading_frames):
        value = pre_norm_value(frame, bias, residual[n, t], residual_bias)
        padded_output[n, t, :-1, :-1] = value


def _convolved(
    input: torch.Tensor, packed_weight: torch.Tensor, zero_leading_frames: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields ``(n, t, frame)`` of the valid convolution."""
    taps = conv3d_taps(packed_weight, input.shape[-1])
    for n in range(input.shape[0]):
        for t in range(input.shape[1] - KERNEL[0] + 1):
            zero_planes = max(zero_leading_frames - t, 0)
            yield n, t, convolve_frame(input[n, t : t + KERNEL[0]], taps, zero_planes)
