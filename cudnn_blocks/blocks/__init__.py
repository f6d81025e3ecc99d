# SPDX-License-Identifier: Apache-2.0
"""Blocks: several stages behind one class, one workspace and one ``execute()``."""

from cudnn_blocks.blocks.gated_attention import GatedAttentionBlockFwd

__all__ = ["GatedAttentionBlockFwd"]
