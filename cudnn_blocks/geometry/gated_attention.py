# SPDX-License-Identifier: Apache-2.0
"""Sizes and mask of the gated attention block, and the column bands of its fused projection.

The projection slab holds ``n_qkvg`` columns in four bands, ``Q | GATE | K | V``, each head-major
with ``d_head`` innermost; every statement about a column lives here.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.attention import (
    scale_of,
    validate_heads,
    validate_mask,
    validate_norm_and_rope,
)
from cudnn_blocks.geometry.frozen import frozen
from cudnn_blocks.geometry.sizes import validate_sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

QKVG_BAND_MULTIPLE = 64
"""The width of a band, heads x d_head, is a multiple of this many columns."""


class ProjBlock(IntEnum):
    """The bands of the projection slab, in column order."""

    Q = 0
    GATE = 1
    K = 2
    V = 3


@frozen
class GatedAttentionGeometry:
    """Sizes, norm and mask of a gated attention layer: projections, QK-norm, RoPE, SDPA, gate.

    ``window_left`` and ``window_right`` count the keys shown to the left and to the right of the
    diagonal, the diagonal itself not counted; -1 is no bound. A causal mask shows nothing right of
    the diagonal unless ``window_right`` says how much.
    """

    d_model: int
    """Width of the hidden state."""
    h_q: int
    """Query heads, and heads of the gate."""
    h_kv: int
    """Key and value heads; divides ``h_q``."""
    d_head: int
    """D, channels of one head."""
    rope_dim: int
    """Leading channels of a head that rotate, even; 0 rotates none."""
    qk_norm_eps: float = 1e-6
    """Added to the mean square under the root of the QK norm."""
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
    qk_norm: bool = True
    """Per-head RMSNorm of Q and K over ``d_head``; False leaves channels past RoPE untouched."""

    def validate(self) -> None:
        """Raises ContractError where a size or the mask lies outside the contract."""
        validate_sizes(self, "d_model", "h_q", "h_kv", "d_head")
        validate_heads(self)
        for name in ("h_q", "h_kv"):
            width = getattr(self, name) * self.d_head
            if width % QKVG_BAND_MULTIPLE:
                expected = f"{name} * d_head a multiple of {QKVG_BAND_MULTIPLE}"
                raise ContractError("d_head", expected, width)
        validate_norm_and_rope(self)
        if not self.qk_norm and self.rope_dim == 0:
            raise ContractError("rope_dim", "at least 2 where qk_norm is False", 0)
        validate_mask(self)

    def validate_hidden(self, hidden_shape: Sequence[int]) -> None:
        """Raises ContractError unless the shape is ``[B, S, d_model]``."""
        shape = tuple(hidden_shape)
        if len(shape) != 3 or shape[2] != self.d_model:
            raise ContractError("h", f"shape [B, S, {self.d_model}]", shape)

    @property
    def scale(self) -> float:
        """The factor of QK^T."""
        return scale_of(self)

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share one key and value head."""
        return self.h_q // self.h_kv

    @property
    def qkvg_heads(self) -> tuple[int, int, int, int]:
        """Heads of each band, in :class:`ProjBlock` order."""
        return (self.h_q, self.h_q, self.h_kv, self.h_kv)

    @property
    def qkvg_block_widths(self) -> tuple[int, int, int, int]:
        """Columns of each band, in :class:`ProjBlock` order."""
        q, kv = self.h_q * self.d_head, self.h_kv * self.d_head
        return (q, q, kv, kv)

    @property
    def qkvg_offsets(self) -> tuple[int, int, int, int]:
        """First column of each band, in :class:`ProjBlock` order."""
        q, gate, k, _ = self.qkvg_block_widths
        return (0, q, q + gate, q + gate + k)

    @property
    def n_qkvg(self) -> int:
        """N, columns of the projection slab and rows of W_qkvg."""
        return sum(self.qkvg_block_widths)

    @property
    def attn_width(self) -> int:
        """``h_q * d_head``: columns of the attention output, which W_o contracts."""
        return self.h_q * self.d_head

    def block_for_column(self, column: int) -> ProjBlock:
        """Returns the band that holds a column of the slab.

        Raises:
            ContractError: the column is outside the slab.
        """
        if not 0 <= column < self.n_qkvg:
            raise ContractError("column", f"0 to {self.n_qkvg - 1}", column)
        return max(band for band in ProjBlock if self.qkvg_offsets[band] <= column)
