# SPDX-License-Identifier: Apache-2.0
"""Single operations: classes with preallocated ``execute``, and their functional forms."""

from cudnn_blocks.ops.conv1d_update import CausalConv1dUpdate, check_status
from cudnn_blocks.ops.conv1d_update_functional import causal_conv1d_update

__all__ = ["CausalConv1dUpdate", "causal_conv1d_update", "check_status"]
