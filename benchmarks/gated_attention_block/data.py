# SPDX-License-Identifier: Apache-2.0
"""Random operands of the block and its parts: BF16, batch 1."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from benchmarks.harness.arm import Role
from benchmarks.harness.checks import PEER, Tolerance

if TYPE_CHECKING:
    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.harness.arm import Arm
    from cudnn_blocks import GatedAttentionGeometry

DTYPE = torch.bfloat16
ELEMENT_BYTES = DTYPE.itemsize
OURS = Tolerance(roundings=1.0, atol=1e-3)
"""The correctly rounded output or its neighbour; the order of FP32 sums shows where they cancel."""
SMALL = ("w_q_norm", "w_k_norm", "cos", "sin")


def normal(*shape: int, device: str, scale: float = 1.0) -> torch.Tensor:
    """Normally distributed."""
    return torch.randn(shape, dtype=DTYPE, device=device) * scale


def poisoned(*shape: int, device: str) -> torch.Tensor:
    """NaN everywhere."""
    return torch.full(shape, torch.nan, dtype=DTYPE, device=device)


def weight(rows: int, columns: int, device: str) -> torch.Tensor:
    """``[rows, columns]`` that keeps the variance of what it multiplies."""
    return normal(rows, columns, device=device, scale=columns**-0.5)


def small_operands(geometry: GatedAttentionGeometry, tokens: int, device: str) -> Tensors:
    """Norm weights near 1, and tables whose halves are alike."""
    angles = torch.rand(1, tokens, geometry.rope_dim // 2, device=device) * (2 * math.pi)
    angles = torch.cat([angles, angles], dim=-1)
    return {
        "w_q_norm": 1 + normal(geometry.d_head, device=device, scale=0.1),
        "w_k_norm": 1 + normal(geometry.d_head, device=device, scale=0.1),
        "cos": angles.cos().to(DTYPE),
        "sin": angles.sin().to(DTYPE),
    }


def small_elements(geometry: GatedAttentionGeometry, tokens: int) -> int:
    """Elements of ``small_operands``."""
    return 2 * geometry.d_head + 2 * tokens * geometry.rope_dim


def bands(slab: torch.Tensor, geometry: GatedAttentionGeometry) -> Tensors:
    """Views ``[1, S, heads, D]`` of the projection slab."""
    parts = slab.split(geometry.qkvg_block_widths, dim=-1)
    return {
        name: part.unflatten(-1, (heads, geometry.d_head))
        for name, part, heads in zip(
            ("q", "gate", "k", "v"), parts, geometry.qkvg_heads, strict=True
        )
    }


def tolerance_of(arm: Arm) -> Tolerance:
    """For outputs of variance about 1; peers may round in between."""
    return PEER if arm.role is Role.PEER else OURS
