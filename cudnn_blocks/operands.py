# SPDX-License-Identifier: Apache-2.0
"""The operand table of an op: each tensor's contract stated once, for samples and calls alike."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cudnn_blocks.errors import ContractError, GradModeError
from cudnn_blocks.tensor_spec import TensorSpec, row_major_stride

Extents = dict[str, int]


class StrideRule(Protocol):
    """Which strides an operand may have."""

    def accepts(self, shape: Sequence[int], stride: Sequence[int]) -> bool:
        """True where the strides are inside the contract."""
        ...

    def describe(self, shape: Sequence[int]) -> str:
        """The expected strides, for an error message."""
        ...


def _same_layout(shape: Sequence[int], stride: Sequence[int], wanted: Sequence[int]) -> bool:
    """Strides of axes with at most one element never matter, nor do those of an empty tensor."""
    if 0 in shape:
        return True
    return all(n == 1 or s == w for n, s, w in zip(shape, stride, wanted, strict=True))


@dataclass(frozen=True)
class Contiguous:
    """Row-major, no gaps."""

    def accepts(self, shape: Sequence[int], stride: Sequence[int]) -> bool:
        """True for row-major strides."""
        return _same_layout(shape, stride, row_major_stride(shape))

    def describe(self, shape: Sequence[int]) -> str:
        """The row-major strides of ``shape``."""
        return f"contiguous strides {row_major_stride(shape)}"


@dataclass(frozen=True)
class RowPitch:
    """A matrix with strides ``(ld, 1)``: compact, or ``ld`` a larger multiple of a number."""

    multiple_of: int

    def accepts(self, shape: Sequence[int], stride: Sequence[int]) -> bool:
        """True for a compact matrix or a legal pitch."""
        rows, columns = shape
        ld = stride[0]
        padded = rows <= 1 or (ld > columns and ld % self.multiple_of == 0)
        return _same_layout(shape, stride, (ld if padded else columns, 1))

    def describe(self, shape: Sequence[int]) -> str:
        """The legal pitches."""
        columns = shape[1]
        return (
            f"strides ({columns}, 1) or (ld, 1) with ld > {columns}, ld % {self.multiple_of} == 0"
        )


@dataclass(frozen=True)
class StateLayout:
    """Strides fixed but for the leading axis' redundancy: exactly ``stride``."""

    stride: tuple[int, ...]

    def accepts(self, shape: Sequence[int], stride: Sequence[int]) -> bool:
        """True for exactly these strides."""
        return _same_layout(shape, stride, self.stride)

    def describe(self, shape: Sequence[int]) -> str:
        """The strides."""
        return f"strides {self.stride}"


@dataclass(frozen=True)
class AnyStrides:
    """Every layout; for operands that are only read."""

    def accepts(self, shape: Sequence[int], stride: Sequence[int]) -> bool:
        """True."""
        return True

    def describe(self, shape: Sequence[int]) -> str:
        """What is expected."""
        return "any strides"


@dataclass(frozen=True)
class Dim:
    """An extent derived from a dynamic one: ``min(at_most, extent of symbol + plus)``."""

    symbol: str
    plus: int = 0
    at_most: int | None = None

    def resolve(self, bound: Extents) -> int:
        """The extent, once the symbol is bound."""
        extent = bound[self.symbol] + self.plus
        return extent if self.at_most is None else min(extent, self.at_most)

    def __str__(self) -> str:
        text = f"{self.symbol}{self.plus:+d}" if self.plus else self.symbol
        return text if self.at_most is None else f"min({self.at_most}, {text})"


@dataclass(frozen=True)
class Operand:
    """One tensor argument of ``execute``.

    ``shape`` holds an int for a fixed extent, a symbol such as ``"N"`` for a dynamic one, and a Dim
    for one derived from a symbol of an earlier operand; equal symbols are equal extents.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str | Dim, ...]
    strides: StrideRule
    alignment_bytes: int = 16
    is_mutated: bool = False
    is_declared: bool = True
    has_sample: bool = True
    """False for an operand that a knob declares rather than a sample."""

    def check(self, spec: TensorSpec, bound: Extents) -> None:
        """Raises ContractError where ``spec`` breaks the contract; binds dynamic extents."""
        if spec.dtype != self.dtype:
            raise ContractError(self.name, f"dtype {self.dtype}", spec.dtype)
        if len(spec.shape) != len(self.shape):
            raise ContractError(self.name, f"shape {self._shape(bound)}", list(spec.shape))
        for axis, (extent, wanted) in enumerate(zip(spec.shape, self.shape, strict=True)):
            expected = _expected_extent(wanted, extent, bound)
            if extent != expected:
                raise ContractError(
                    self.name,
                    f"shape {self._shape(bound)}",
                    f"{list(spec.shape)} (axis {axis} is {extent}, not {expected})",
                )
        if not self.strides.accepts(spec.shape, spec.stride):
            raise ContractError(self.name, self.strides.describe(spec.shape), spec.stride)
        known = spec.alignment_bytes
        if known is not None and known % self.alignment_bytes and 0 not in spec.shape:
            raise ContractError(
                self.name,
                f"a {self.alignment_bytes}-byte aligned address",
                f"an address aligned to {known} bytes",
            )

    def _shape(self, bound: Extents) -> str:
        return f"[{', '.join(_spell_extent(part, bound) for part in self.shape)}]"


@dataclass(frozen=True)
class OperandTable:
    """Every operand of ``execute``, in its positional order."""

    operands: tuple[Operand, ...]

    def check_samples(self, specs: Mapping[str, TensorSpec]) -> Extents:
        """Checks the constructor's samples; returns the largest extent of each dynamic axis."""
        bound: Extents = {}
        for operand in self.operands:
            if operand.is_declared and operand.has_sample:
                operand.check(specs[operand.name], bound)
        return bound

    def check_call(
        self, tensors: Sequence[torch.Tensor | None], limits: Extents, device: torch.device
    ) -> Extents:
        """Checks the tensors of one call, all of it before anything is launched or written.

        Args:
            tensors: one per operand, in table order; None where it is not declared.
            limits: the largest extent of each dynamic axis that the plan accepts.
            device: where every tensor has to be.

        Returns:
            The extents of this call's dynamic axes.
        """
        bound: Extents = {}
        for operand, tensor in zip(self.operands, tensors, strict=True):
            self._check_presence(operand, tensor)
            if tensor is None:
                continue
            spec = TensorSpec.of(operand.name, tensor)
            if spec.device != device:
                raise ContractError(operand.name, f"a tensor on {device}", spec.device)
            operand.check(spec, bound)
            if spec.requires_grad and torch.is_grad_enabled():
                raise GradModeError(
                    f"{operand.name}: requires grad while grad mode is on; this op has no autograd "
                    "formula, call it under torch.no_grad() or torch.inference_mode()"
                )
        for symbol, extent in bound.items():
            if extent > limits[symbol]:
                raise ContractError(symbol, f"at most {limits[symbol]}, the sample's", extent)
        self._check_overlap(tensors)
        return bound

    def canonical(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The same tensors, strides of one-element axes made row-major, as kernels expect."""
        return [None if tensor is None else _canonical_strides(tensor) for tensor in tensors]

    @staticmethod
    def _check_presence(operand: Operand, tensor: object) -> None:
        if operand.is_declared and tensor is None:
            raise ContractError(operand.name, "a tensor, as declared at construction", None)
        if not operand.is_declared and tensor is not None:
            raise ContractError(operand.name, "None, since it was not declared", "a tensor")

    def is_disjoint(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """True where no written operand shares bytes with another operand."""
        return self._find_overlap(tensors) is None

    def _check_overlap(self, tensors: Sequence[torch.Tensor | None]) -> None:
        overlap = self._find_overlap(tensors)
        if overlap is not None:
            raise ContractError(
                overlap[0],
                f"memory of its own, since it is written, apart from {overlap[1]}",
                "overlapping byte ranges",
            )

    def _find_overlap(self, tensors: Sequence[torch.Tensor | None]) -> tuple[str, str] | None:
        """Names of a written operand and of one that it overlaps."""
        spans = [
            (operand, *byte_span(tensor))
            for operand, tensor in zip(self.operands, tensors, strict=True)
            if tensor is not None and tensor.numel()
        ]
        for (a, a_low, a_high), (b, b_low, b_high) in itertools.combinations(spans, 2):
            if (a.is_mutated or b.is_mutated) and a_low < b_high and b_low < a_high:
                return (a.name, b.name) if a.is_mutated else (b.name, a.name)
        return None


def _expected_extent(wanted: int | str | Dim, extent: int, bound: Extents) -> int:
    """The extent asked for; binds a symbol met for the first time to the one that came."""
    if isinstance(wanted, str):
        return bound.setdefault(wanted, extent)
    return wanted.resolve(bound) if isinstance(wanted, Dim) else wanted


def _spell_extent(part: int | str | Dim, bound: Extents) -> str:
    if isinstance(part, int):
        return str(part)
    symbol = part.symbol if isinstance(part, Dim) else part
    if symbol not in bound:
        return str(part)
    return f"{part} = {part.resolve(bound) if isinstance(part, Dim) else bound[part]}"


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte address and the one past the last that a non-empty strided tensor reaches."""
    low = tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (last + 1) * tensor.element_size()


def _canonical_strides(tensor: torch.Tensor) -> torch.Tensor:
    if 1 not in tensor.shape:
        return tensor
    compact = row_major_stride(tensor.shape)
    stride = [
        c if n == 1 else s for n, s, c in zip(tensor.shape, tensor.stride(), compact, strict=True)
    ]
    return tensor.as_strided(tensor.shape, stride)
