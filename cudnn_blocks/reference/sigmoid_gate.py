# SPDX-License-Identifier: Apache-2.0
"""Sigmoid gate in plain torch, at the rounding points of the contract."""

from __future__ import annotations

import torch


def sigmoid_gate(o: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
    """``out = A(float(o) * sigmoid(float(gate)))``, with ``A`` the rounding to the dtype of out.

    ``out`` may be ``o``. The sigmoid is 0 at -inf and 1 at inf; NaN stays NaN.
    """
    out.copy_(o.float() * torch.sigmoid(gate.float()))
