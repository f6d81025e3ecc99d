# SPDX-License-Identifier: Apache-2.0
"""Matrix products with weights in block-scaled codes."""
