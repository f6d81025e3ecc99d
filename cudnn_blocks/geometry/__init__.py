# SPDX-License-Identifier: Apache-2.0
"""Frozen, validated, model-free sizes. Pure Python: no torch, no CUDA."""

from cudnn_blocks.geometry.causal_conv1d import CausalConv1dGeometry

__all__ = ["CausalConv1dGeometry"]
