# SPDX-License-Identifier: Apache-2.0
"""Matrix products of the projections, plain or with QK-norm and RoPE in the epilogue."""
