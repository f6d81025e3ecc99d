# SPDX-License-Identifier: Apache-2.0
"""Causal conv1d stages."""
