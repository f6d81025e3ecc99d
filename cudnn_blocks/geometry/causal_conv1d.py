# SPDX-License-Identifier: Apache-2.0
"""Sizes of the depthwise causal conv1d decode update."""

from __future__ import annotations

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.frozen import frozen
from cudnn_blocks.geometry.sizes import validate_sizes

PADDING_SLOT = -1
"""Slot of a padding row."""
NO_FAULT, BELOW_PADDING, OUT_OF_RANGE, DUPLICATE = range(4)
"""What is wrong with a row's slot, as ``status`` records it."""


@frozen
class CausalConv1dGeometry:
    """``D`` channels, filter width ``W`` and cached tokens ``L`` of a causal conv1d update."""

    channels: int
    """D, any positive number of channels."""
    width: int = 4
    """W, taps of the filter, the newest token included."""
    state_len: int = 4
    """L, tokens kept per slot and channel, the newest last; at least W - 1."""

    def validate(self) -> None:
        """Raises ContractError where a size lies outside the contract."""
        validate_sizes(self, "channels", "width", "state_len")
        if self.state_len < self.width - 1:
            raise ContractError(
                "state_len", f"at least width - 1 = {self.width - 1}", self.state_len
            )
