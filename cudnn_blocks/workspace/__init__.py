# SPDX-License-Identifier: Apache-2.0
"""The caller's scratch memory: layout, views, guards for tests."""

from cudnn_blocks.workspace.guard import GuardedBuffer
from cudnn_blocks.workspace.layout import (
    ENGINE_SCRATCH,
    REGION_ALIGNMENT_BYTES,
    Region,
    WorkspaceLayout,
)

__all__ = [
    "ENGINE_SCRATCH",
    "REGION_ALIGNMENT_BYTES",
    "GuardedBuffer",
    "Region",
    "WorkspaceLayout",
]
