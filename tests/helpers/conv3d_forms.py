# SPDX-License-Identifier: Apache-2.0
"""The kinds of Conv3D op: class, function and reference of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cudnn_blocks import (
    CausalConv3dWithCache,
    Conv3dBiasResidualPad,
    Conv3dRaw,
    Conv3dRmsNormSilu,
    Conv3dRmsNormSiluPad,
    RmsNormSiluPad,
    ops,
)
from cudnn_blocks.reference import conv3d, conv3d_cache

RAW, NORM, NORM_PAD, BIAS_PAD, NORM_ONLY, CAUSAL = (
    "raw",
    "norm",
    "norm_pad",
    "bias_residual_pad",
    "norm_only",
    "causal",
)
KINDS = (RAW, NORM, NORM_PAD, BIAS_PAD, NORM_ONLY, CAUSAL)
CONV_KINDS = KINDS[:4]
"""The valid convolutions."""


@dataclass(frozen=True)
class OpForms:
    """The class of an op, its function and its reference."""

    op: type
    function: Callable[..., Any]
    reference: Callable[..., None]
    knobs: tuple[str, ...] = ()


FORMS = {
    RAW: OpForms(Conv3dRaw, ops.conv3d_raw, conv3d.conv3d_raw, ("zero_leading_frames",)),
    NORM: OpForms(
        Conv3dRmsNormSilu,
        ops.conv3d_rmsnorm_silu,
        conv3d.conv3d_rmsnorm_silu,
        ("zero_leading_frames",),
    ),
    NORM_PAD: OpForms(
        Conv3dRmsNormSiluPad,
        ops.conv3d_rmsnorm_silu_pad,
        conv3d.conv3d_rmsnorm_silu_pad,
        ("history_frames", "zero_leading_frames"),
    ),
    BIAS_PAD: OpForms(
        Conv3dBiasResidualPad,
        ops.conv3d_bias_residual_pad,
        conv3d.conv3d_bias_residual_pad,
        ("zero_leading_frames",),
    ),
    NORM_ONLY: OpForms(RmsNormSiluPad, ops.rmsnorm_silu_pad, conv3d_cache.rmsnorm_silu_pad),
    CAUSAL: OpForms(
        CausalConv3dWithCache,
        ops.causal_conv3d_with_cache,
        conv3d_cache.causal_conv3d_with_cache,
    ),
}
