# SPDX-License-Identifier: Apache-2.0
"""The stages of the gated attention block behind one host call."""
