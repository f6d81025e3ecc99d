# SPDX-License-Identifier: Apache-2.0
"""Sizes of the sigmoid gate operation."""

from __future__ import annotations

from cudnn_blocks.geometry.frozen import frozen
from cudnn_blocks.geometry.sizes import validate_sizes


@frozen
class SigmoidGateGeometry:
    """Heads and channels of an attention output."""

    h_q: int
    """Heads."""
    d_head: int
    """D, channels of one head."""

    def validate(self) -> None:
        """Raises ContractError where a size lies outside the contract."""
        validate_sizes(self, "h_q", "d_head")
