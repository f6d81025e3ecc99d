# SPDX-License-Identifier: Apache-2.0
"""Heads, scale and mask of scaled dot product attention."""

from __future__ import annotations

from cudnn_blocks.geometry.attention import scale_of, validate_heads, validate_mask
from cudnn_blocks.geometry.frozen import frozen
from cudnn_blocks.geometry.gated_attention import GatedAttentionGeometry
from cudnn_blocks.geometry.sizes import validate_sizes


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
        validate_sizes(self, "h_q", "h_kv", "d_head")
        validate_heads(self)
        validate_mask(self)

    @property
    def scale(self) -> float:
        """The factor of QK^T."""
        return scale_of(self)
