# SPDX-License-Identifier: Apache-2.0
"""QK-RMSNorm and partial RoPE on the Q and K heads of a projection."""
