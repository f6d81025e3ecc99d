# SPDX-License-Identifier: Apache-2.0
"""Views of a wider array: their stride rule, and what keeps two of them apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

VEC = 8
"""16-bit elements in 16 bytes."""


@dataclass(frozen=True)
class Strided:
    """Innermost stride 1, the others multiples of a number, in any order; 0 repeats an axis."""

    multiple_of: int
    is_written: bool = False
    """No two elements share a place."""

    def accepts(self, shape: Sequence[int], stride: Sequence[int]) -> bool:
        """True for such strides; those of axes with one element never matter."""
        if 0 in shape:
            return True
        if shape[-1] > 1 and stride[-1] != 1:
            return False
        outer = sorted((s, n) for n, s in zip(shape[:-1], stride[:-1], strict=True) if n > 1)
        reach = shape[-1]
        for step, extent in outer:
            if step % self.multiple_of or (self.is_written and step < reach):
                return False
            reach += step * (extent - 1)
        return True

    def is_plain(self, stride: Sequence[int]) -> bool:
        """True where even the strides of axes with one element are of the form."""
        return stride[-1] == 1 and not any(step % self.multiple_of for step in stride[:-1])

    def describe(self, shape: Sequence[int]) -> str:
        """The legal strides."""
        apart = " that keep all elements apart" if self.is_written else ""
        return f"strides (..., 1), the others multiples of {self.multiple_of}{apart}"


@dataclass(frozen=True)
class PitchedRows(Strided):
    """``[B, S, C]`` whose ``B * S`` rows lie at one pitch: compact, or a larger multiple of 8."""

    multiple_of: int = VEC
    is_written: bool = True

    def accepts(self, shape: Sequence[int], stride: Sequence[int]) -> bool:
        """True for such strides; those of axes with one element never matter."""
        if 0 in shape:
            return True
        batch, rows, columns = shape
        if columns > 1 and stride[2] != 1:
            return False
        if batch == rows == 1:
            return True
        pitch = stride[1] if rows > 1 else stride[0]
        is_wide = pitch > columns and pitch % self.multiple_of == 0
        is_even = batch == 1 or rows == 1 or stride[0] == rows * pitch
        return is_even and (pitch == columns or is_wide)

    def describe(self, shape: Sequence[int]) -> str:
        """The legal pitches."""
        rows, columns = shape[1], shape[2]
        return (
            f"strides ({rows} * ld, ld, 1) with ld = {columns}, "
            f"or larger with ld % {self.multiple_of} == 0"
        )


def vector_strides(width: int, *, is_written: bool = False) -> Strided:
    """The rule of a tensor whose rows of 16-bit elements are moved in 16-byte vectors.

    A width that is no multiple of 8 passes in compact strides; no engine serves it, and says so.
    """
    return Strided(math.gcd(VEC, width), is_written)


def are_interleaved(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True where ``a`` and ``b`` are column bands of one pitched array without a common byte.

    So are Q and K in a projection slab: their byte ranges overlap, their columns do not.
    """
    distance = b.data_ptr() - a.data_ptr()
    for pitch in _steps(a) | _steps(b):
        a_width, b_width = _band_width(a, pitch), _band_width(b, pitch)
        b_start = distance % pitch
        if a_width <= b_start and b_start + b_width <= pitch:
            return True
    return False


def _axes(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Extent and stride in bytes of the axes that have one."""
    size = tensor.element_size()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [(n, s * size) for n, s in pairs if n > 1 and s > 0]


def _steps(tensor: torch.Tensor) -> set[int]:
    return {step for _, step in _axes(tensor)}


def _band_width(tensor: torch.Tensor, pitch: int) -> int:
    """Bytes from the first to past the last of one row, where rows are ``pitch`` bytes apart."""
    inside = sum((n - 1) * step for n, step in _axes(tensor) if step % pitch)
    return inside + tensor.element_size()
