# SPDX-License-Identifier: Apache-2.0
"""Frozen, validated, model-free sizes. Pure Python: no torch, no CUDA."""

from cudnn_blocks.geometry.causal_conv1d import CausalConv1dGeometry
from cudnn_blocks.geometry.conv3d import (
    CausalConv3dGeometry,
    Conv3dGeometry,
    RmsNormSiluGeometry,
)
from cudnn_blocks.geometry.gated_attention import GatedAttentionGeometry, ProjBlock
from cudnn_blocks.geometry.qk_norm_rope import QkNormRopeGeometry
from cudnn_blocks.geometry.sdpa import SdpaGeometry
from cudnn_blocks.geometry.sigmoid_gate import SigmoidGateGeometry

__all__ = [
    "CausalConv1dGeometry",
    "CausalConv3dGeometry",
    "Conv3dGeometry",
    "GatedAttentionGeometry",
    "ProjBlock",
    "QkNormRopeGeometry",
    "RmsNormSiluGeometry",
    "SdpaGeometry",
    "SigmoidGateGeometry",
]
