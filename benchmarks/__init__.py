# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: cases as data, peers in the same run, results as JSON.

``python -m benchmarks.run --list`` shows the cases; the same without ``--list`` runs them.
"""
