# SPDX-License-Identifier: Apache-2.0
"""Valid 3x3x3 convolutions with their post-operations."""
