# SPDX-License-Identifier: Apache-2.0
"""What the arms of a row hold, as words beside their engines."""

from __future__ import annotations

MB = 1e6


def held(weight_bytes: int, workspace_bytes: int = 0) -> str:
    """Bytes of the weights, and of the workspace that a caller hands over."""
    return f"weights {weight_bytes / MB:.1f} MB, workspace {workspace_bytes / MB:.1f} MB"
