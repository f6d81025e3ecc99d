# SPDX-License-Identifier: Apache-2.0
"""Normalisation, activation and padding of NTHWC activations."""
