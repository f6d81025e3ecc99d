# SPDX-License-Identifier: Apache-2.0
"""Constraints that the geometries with attention heads share, stated once.

Each takes a geometry that has the fields it looks at.
"""

from __future__ import annotations

import math
from typing import Any

from cudnn_blocks.errors import ContractError


def validate_heads(geometry: Any) -> None:
    """Raises ContractError unless ``h_kv`` divides ``h_q``."""
    if geometry.h_q % geometry.h_kv:
        raise ContractError("h_q", f"a multiple of h_kv = {geometry.h_kv}", geometry.h_q)


def validate_mask(geometry: Any) -> None:
    """Raises ContractError where the scale or the mask lies outside the contract."""
    scale = geometry.attn_scale
    if scale is not None and not (scale > 0 and math.isfinite(scale)):
        raise ContractError("attn_scale", "a positive number, or None", scale)
    for name in ("window_left", "window_right"):
        if getattr(geometry, name) < -1:
            raise ContractError(name, "-1 for no bound, or a count", getattr(geometry, name))
    if geometry.causal_bottom_right and not geometry.is_causal:
        raise ContractError("causal_bottom_right", "False where is_causal is False", True)
    if geometry.window_right >= 0 and not geometry.is_causal:
        raise ContractError("window_right", "-1 where is_causal is False", geometry.window_right)


def validate_norm_and_rope(geometry: Any) -> None:
    """Raises ContractError where ``rope_dim`` or ``qk_norm_eps`` lies outside the contract."""
    if not 0 <= geometry.rope_dim <= geometry.d_head or geometry.rope_dim % 2:
        expected = f"an even number from 0 to d_head = {geometry.d_head}"
        raise ContractError("rope_dim", expected, geometry.rope_dim)
    if not (geometry.qk_norm_eps > 0 and math.isfinite(geometry.qk_norm_eps)):
        raise ContractError("qk_norm_eps", "a positive number", geometry.qk_norm_eps)


def scale_of(geometry: Any) -> float:
    """The factor of QK^T: ``attn_scale``, or ``d_head ** -0.5``."""
    scale: float | None = geometry.attn_scale
    return float(geometry.d_head**-0.5) if scale is None else scale
