# SPDX-License-Identifier: Apache-2.0
"""Sizes of the sigmoid gate operation."""

from __future__ import annotations

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.frozen import frozen


@frozen
class SigmoidGateGeometry:
    """Heads and channels of an attention output."""

    h_q: int
    """Heads."""
    d_head: int
    """D, channels of one head."""

    def validate(self) -> None:
        """Raises ContractError where a size lies outside the contract."""
        for name in ("h_q", "d_head"):
            if getattr(self, name) < 1:
                raise ContractError(name, "a positive size", getattr(self, name))
