# SPDX-License-Identifier: Apache-2.0
"""Sizes of a quantiser's values."""

from __future__ import annotations

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.frozen import frozen
from cudnn_blocks.geometry.sizes import validate_sizes


@frozen
class QuantizeGeometry:
    """Heads and channels; rows are one head."""

    heads: int
    """Heads of a token; 1 for rows."""
    d_head: int
    """D, channels of a head or of a row."""
    block_channels: int = 1
    """Channels under one scale; D is a multiple of it."""

    def validate(self) -> None:
        """Raises ContractError where a size lies outside the contract."""
        validate_sizes(self, "heads", "d_head")
        if self.d_head % self.block_channels:
            expected = f"a multiple of the block, {self.block_channels} channels"
            raise ContractError("d_head", expected, self.d_head)
