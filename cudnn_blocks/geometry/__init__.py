# SPDX-License-Identifier: Apache-2.0
"""Frozen, validated, model-free sizes. Pure Python: no torch, no CUDA."""

from cudnn_blocks.geometry.causal_conv1d import CausalConv1dGeometry
from cudnn_blocks.geometry.conv3d import (
    CausalConv3dGeometry,
    Conv3dGeometry,
    RmsNormSiluGeometry,
)

__all__ = [
    "CausalConv1dGeometry",
    "CausalConv3dGeometry",
    "Conv3dGeometry",
    "RmsNormSiluGeometry",
]
