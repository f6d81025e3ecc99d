# SPDX-License-Identifier: Apache-2.0
"""Shared ``@cute.jit`` helpers."""
