# SPDX-License-Identifier: Apache-2.0
"""Scaled dot product attention, with the sigmoid gate of its output where asked for."""
