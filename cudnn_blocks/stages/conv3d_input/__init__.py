# SPDX-License-Identifier: Apache-2.0
"""The streaming causal convolution 12 -> 160: packing of chunk and history, then convolving."""
