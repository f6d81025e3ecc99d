# SPDX-License-Identifier: Apache-2.0
"""The constraint that every geometry has: sizes are positive."""

from __future__ import annotations

from cudnn_blocks.errors import ContractError


def validate_sizes(geometry: object, *names: str) -> None:
    """Raises ContractError unless the named sizes are positive."""
    for name in names:
        if getattr(geometry, name) < 1:
            raise ContractError(name, "a positive size", getattr(geometry, name))
