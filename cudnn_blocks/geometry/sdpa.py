# SPDX-License-Identifier: Apache-2.0
"""Heads, scale and mask of scaled dot product attention."""

from __future__ import annotations

import math

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.frozen import frozen
from cudnn_blocks.geometry.gated_attention import GatedAttentionGeometry


@frozen
class SdpaGeometry:
    """Sizes and mask of attention.

    ``window_left`` and ``window_right`` count the keys shown to the left and to the right of the
    diagonal, the diagonal itself not counted; -1 is no bound. A causal mask shows nothing right of
    the diagonal unless ``window_right`` says how much.
    """

    h_q: int
    """Query heads."""
    h_kv: int
    """Key and value heads; divides ``h_q``."""
    d_head: int
    """D, channels of one head."""
    attn_scale: float | None = None
    """Factor of QK^T; None for ``d_head ** -0.5``."""
    is_causal: bool = True
    """Query row i sees no key past its diagonal."""
    causal_bottom_right: bool = False
    """The diagonal ends in the last key instead of starting in the first."""
    window_left: int = -1
    """Keys shown left of the diagonal; -1 for all."""
    window_right: int = -1
    """Keys shown right of a causal diagonal; -1 and 0 for none."""

    @classmethod
    def of(cls, geometry: SdpaGeometry | GatedAttentionGeometry) -> SdpaGeometry:
        """The geometry itself, or the part of a block's that attention needs."""
        if isinstance(geometry, SdpaGeometry):
            return geometry
        return cls(
            h_q=geometry.h_q,
            h_kv=geometry.h_kv,
            d_head=geometry.d_head,
            attn_scale=geometry.attn_scale,
            is_causal=geometry.is_causal,
            causal_bottom_right=geometry.causal_bottom_right,
            window_left=geometry.window_left,
            window_right=geometry.window_right,
        )

    def validate(self) -> None:
        """Raises ContractError where a size or the mask lies outside the contract."""
        for name in ("h_q", "h_kv", "d_head"):
            if getattr(self, name) < 1:
                raise ContractError(name, "a positive size", getattr(self, name))
        if self.h_q % self.h_kv:
            raise ContractError("h_q", f"a multiple of h_kv = {self.h_kv}", self.h_q)
        scale = self.attn_scale
        if scale is not None and not (scale > 0 and math.isfinite(scale)):
            raise ContractError("attn_scale", "a positive number, or None", scale)
        for name in ("window_left", "window_right"):
            if getattr(self, name) < -1:
                raise ContractError(name, "-1 for no bound, or a count", getattr(self, name))
        if self.causal_bottom_right and not self.is_causal:
            raise ContractError("causal_bottom_right", "False where is_causal is False", True)
        if self.window_right >= 0 and not self.is_causal:
            expected = "-1 where is_causal is False"
            raise ContractError("window_right", expected, self.window_right)

    @property
    def scale(self) -> float:
        """The factor of QK^T."""
        return self.d_head**-0.5 if self.attn_scale is None else self.attn_scale
