# SPDX-License-Identifier: Apache-2.0
"""Quantisers to e4m3 and to block formats, and back to BF16."""
