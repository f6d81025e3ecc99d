# SPDX-License-Identifier: Apache-2.0
"""Sizes of the QK-RMSNorm and RoPE operation."""

from __future__ import annotations

import math

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.attention import validate_norm_and_rope
from cudnn_blocks.geometry.frozen import frozen
from cudnn_blocks.geometry.sizes import validate_sizes


@frozen
class QkNormRopeGeometry:
    """Heads and channels of Q and K, and what is done to them."""

    h_q: int
    """Query heads."""
    h_kv: int
    """Key heads."""
    d_head: int
    """D, channels of one head."""
    rope_dim: int
    """Leading channels of a head that rotate, even; 0 rotates none."""
    qk_norm: bool
    """Per-head RMSNorm over D before the rotation."""
    qk_norm_eps: float = 1e-6
    """Added to the mean square under the root."""

    def validate(self) -> None:
        """Raises ContractError where a size lies outside the contract."""
        validate_sizes(self, "h_q", "h_kv", "d_head")
        validate_norm_and_rope(self)
        if not self.qk_norm and self.rope_dim == 0:
            raise ContractError("rope_dim", "at least 2 where there is no norm", 0)

    @property
    def table_stride_multiple(self) -> int:
        """Elements that the strides of the tables are multiples of; compact ones always are."""
        return math.gcd(8, self.rope_dim // 2)
