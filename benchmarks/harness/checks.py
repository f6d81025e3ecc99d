# SPDX-License-Identifier: Apache-2.0
"""Correctness before timing: a comparison returns None, or one line that says what is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """``|actual - expected| <= atol + roundings * eps(dtype) * |expected|``."""

    roundings: float
    atol: float


ONE_ROUNDING = Tolerance(roundings=1.0, atol=1e-5)
"""The correctly rounded output or its neighbour; the absolute term covers FP32 summation order."""
PEER = Tolerance(roundings=4.0, atol=3e-2)
"""Peers may use approximate sigmoids."""
CONV3D = Tolerance(roundings=0.02 / torch.finfo(torch.bfloat16).eps, atol=0.02)
"""``atol = rtol = 0.02``, the tolerance of the Conv3D family's contract."""


def close(
    actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, name: str = "output"
) -> str | None:
    """Compares an output with what is expected, in FP32; NaN never passes."""
    if actual.shape != expected.shape:
        return f"{name} shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    wide = expected.float()
    error = (actual.float() - wide).abs()
    bound = tolerance.atol + tolerance.roundings * torch.finfo(actual.dtype).eps * wide.abs()
    bad = ~(error <= bound)
    if not bad.any():
        return None
    worst = torch.where(error.isnan(), torch.inf, error).max().item()
    return f"{name}: {int(bad.sum())} of {bad.numel()} elements off, worst error {worst:.3g}"


def same_bits(name: str, actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Compares 16-bit tensors bit by bit."""
    bad = actual.view(torch.int16) != expected.view(torch.int16)
    return (
        f"{name}: {int(bad.sum())} of {bad.numel()} elements differ in bits" if bad.any() else None
    )
