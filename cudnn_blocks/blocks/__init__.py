# SPDX-License-Identifier: Apache-2.0
"""Blocks: several stages behind one class, one workspace and one ``execute()``."""

from cudnn_blocks.blocks.gated_attention import GatedAttentionBlockFwd
from cudnn_blocks.blocks.gated_attention_samples import UNIT_SPECS, block_samples

__all__ = ["UNIT_SPECS", "GatedAttentionBlockFwd", "block_samples"]
