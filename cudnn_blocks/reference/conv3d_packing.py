# SPDX-License-Identifier: Apache-2.0
"""Packing of 3x3x3 checkpoint weights into the layouts that the Conv3D family reads.

Pack once per set of weights, outside the inference loop: a packed weight is a copy, so repack after
the source changes. Both layouts keep the input channels of one filter tap together, and the taps in
T, R, S order. The zeros that they add are part of the contract; the result of a convolution with
anything else in their place is undefined.
"""

from __future__ import annotations

import torch

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.conv3d import (
    CAUSAL_PADDED_CHANNELS,
    KERNEL,
    KERNEL_TAPS,
    CausalConv3dGeometry,
    Conv3dGeometry,
)


def pack_conv3d_weight(weight: torch.Tensor) -> torch.Tensor:
    """Packs OITRS into OTRSI, each input-channel row zero-padded to a multiple of 64.

    The copy is differentiable: packed outside ``torch.no_grad()``, a weight that requires grad
    gives a packed weight that does, which the ops refuse while grad mode is on.

    Args:
        weight: ``[Co, Ci, 3, 3, 3]`` BF16, any strides, any device.

    Returns:
        ``[Co, 3, 3, 3, ceil64(Ci)]`` BF16, contiguous, on the same device, never an alias.

    Raises:
        TypeError: ``weight`` is not a BF16 tensor.
        ContractError: ``weight`` is not ``[Co, Ci, 3, 3, 3]`` with positive Co and Ci.
    """
    _check_weight_type(weight)
    shape = tuple(weight.shape)
    if len(shape) != 5 or shape[2:] != KERNEL or min(shape) < 1:
        raise ContractError("weight", "shape [Co, Ci, 3, 3, 3]", shape)
    geometry = Conv3dGeometry(in_channels=shape[1], out_channels=shape[0])
    packed = weight.new_zeros(geometry.packed_weight_shape)
    packed[..., : shape[1]] = weight.permute(0, 2, 3, 4, 1)
    return packed


def pack_causal_conv3d_weight(weight: torch.Tensor) -> torch.Tensor:
    """Packs the causal 12 -> 160 weight into rows of 27 taps x 16 channels and one zero tap.

    Column ``16 * tap + channel`` holds ``weight[:, channel, t, r, s]``, ``tap = 9 t + 3 r + s``.
    Channels 12 to 15 of every tap and the 28th tap are zero. Differentiable, as
    :func:`pack_conv3d_weight` is.

    Args:
        weight: ``[160, 12, 3, 3, 3]`` BF16, any strides, any device.

    Returns:
        ``[160, 448]`` BF16, contiguous, on the same device.

    Raises:
        TypeError: ``weight`` is not a BF16 tensor.
        ContractError: ``weight`` is not ``[160, 12, 3, 3, 3]``.
    """
    _check_weight_type(weight)
    geometry = CausalConv3dGeometry()
    expected = (geometry.out_channels, geometry.in_channels, *KERNEL)
    if tuple(weight.shape) != expected:
        raise ContractError("weight", f"shape {expected}", tuple(weight.shape))
    packed = weight.new_zeros(geometry.packed_weight_shape)
    taps = packed.view(geometry.out_channels, -1, CAUSAL_PADDED_CHANNELS)
    taps[:, :KERNEL_TAPS, : geometry.in_channels] = weight.flatten(2).transpose(1, 2)
    return packed


def conv3d_taps(packed_weight: torch.Tensor, in_channels: int) -> torch.Tensor:
    """Returns the filter of a packed weight as FP32 ``[27, Ci, Co]``, without its padding."""
    taps = packed_weight.flatten(1, 3)[..., :in_channels]
    return taps.permute(1, 2, 0).float().contiguous()


def causal_conv3d_taps(packed_weight: torch.Tensor, in_channels: int) -> torch.Tensor:
    """Returns the filter of a packed causal weight as FP32 ``[27, Ci, Co]``, without padding."""
    taps = packed_weight.reshape(packed_weight.shape[0], -1, CAUSAL_PADDED_CHANNELS)
    return taps[:, :KERNEL_TAPS, :in_channels].permute(1, 2, 0).float().contiguous()


def _check_weight_type(weight: object) -> None:
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight: expected a torch.Tensor, got {type(weight).__name__}")
    if weight.dtype != torch.bfloat16:
        raise TypeError(f"weight: expected dtype torch.bfloat16, got {weight.dtype}")
