# SPDX-License-Identifier: Apache-2.0
"""Sizes of a matrix product of activations and a weight."""

from __future__ import annotations

from cudnn_blocks.geometry.frozen import frozen
from cudnn_blocks.geometry.sizes import validate_sizes


@frozen
class GemmGeometry:
    """``N`` columns of the result and ``K`` summed products each; rows are not part of it."""

    n: int
    """Rows of the weight."""
    k: int
    """Columns of the weight and of the activations."""

    def validate(self) -> None:
        """Raises ContractError where a size lies outside the contract."""
        validate_sizes(self, "n", "k")
