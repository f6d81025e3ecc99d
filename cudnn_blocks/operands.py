# SPDX-License-Identifier: Apache-2.0
"""The operand table of an op: each tensor's contract stated once, for samples and calls alike."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cudnn_blocks.errors import ContractError, GradModeError
from cudnn_blocks.strided import are_interleaved
from cudnn_blocks.tensor_spec import TensorSpec, has_storage, row_major_stride

ACTIVATION_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""Served activations, and what stages call them."""
ANY_EXTENT = 2**31 - 1
"""The limit of an axis that a plan does not limit."""
Extents = dict[str, int]
Shape = tuple[int | str, ...]


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


def check_activation_dtype(name: str, dtype: torch.dtype) -> None:
    """Raises ContractError unless ``dtype`` is one of ``ACTIVATION_DTYPES``."""
    if dtype not in ACTIVATION_DTYPES:
        raise ContractError(name, f"dtype {' or '.join(map(str, ACTIVATION_DTYPES))}", dtype)


@dataclass(frozen=True)
class Operand:
    """One tensor argument of ``execute``.

    ``shape`` holds an int for a fixed extent and a symbol such as ``"N"`` for a dynamic one; equal
    symbols are equal extents. None where the table derives the shape from the first operand's.
    """

    name: str
    dtype: torch.dtype
    shape: Shape | None
    strides: StrideRule
    alignment_bytes: int = 16
    is_mutated: bool = False
    is_declared: bool = True
    has_sample: bool = True
    """False for an operand that a knob declares rather than a sample."""
    may_be: str | None = None
    """Another operand that may be given again as this one; part of it may not."""

    def check(self, spec: TensorSpec, bound: Extents, derived: Sequence[int] | None = None) -> None:
        """Raises ContractError where ``spec`` breaks the contract; binds dynamic extents.

        Args:
            spec: the tensor at hand.
            bound: extents of the symbols met so far.
            derived: the shape to have where ``self.shape`` is None.
        """
        shape = self.shape or tuple(derived or ())
        if spec.dtype != self.dtype:
            raise ContractError(self.name, f"dtype {self.dtype}", spec.dtype)
        if len(spec.shape) != len(shape):
            raise ContractError(self.name, _spell_shape(shape, bound), list(spec.shape))
        for axis, (extent, wanted) in enumerate(zip(spec.shape, shape, strict=True)):
            expected = bound.setdefault(wanted, extent) if isinstance(wanted, str) else wanted
            if extent != expected:
                raise ContractError(
                    self.name,
                    _spell_shape(shape, bound),
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


@dataclass(frozen=True)
class OperandTable:
    """Every operand of ``execute``, in its positional order.

    ``derive`` turns the shape of the first operand into the shapes of those whose own is None, by
    name, and raises ContractError for a first shape outside the contract.
    """

    operands: tuple[Operand, ...]
    derive: Callable[[Sequence[int]], Mapping[str, Sequence[int]]] | None = None

    def check_samples(self, specs: Mapping[str, TensorSpec]) -> Extents:
        """Checks the constructor's samples; returns the largest extent of each dynamic axis."""
        return self._check_specs(
            (operand, specs[operand.name])
            for operand in self.operands
            if operand.is_declared and operand.has_sample
        )

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
        given = [
            (operand, TensorSpec.of(operand.name, tensor))
            for operand, tensor in zip(self.operands, tensors, strict=True)
            if _is_given(operand, tensor)
        ]
        for operand, spec in given:
            if spec.device != device:
                raise ContractError(operand.name, f"a tensor on {device}", spec.device)
        bound = self._check_specs(given)
        for operand, spec in given:
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

    def _check_specs(self, given: Iterable[tuple[Operand, TensorSpec]]) -> Extents:
        bound: Extents = {}
        derived: Mapping[str, Sequence[int]] = {}
        for operand, spec in given:
            operand.check(spec, bound, derived.get(operand.name))
            if operand is self.operands[0] and self.derive is not None:
                derived = self.derive(spec.shape)
        return bound

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

    def check_workspace(
        self, workspace: torch.Tensor | None, tensors: Sequence[torch.Tensor | None]
    ) -> None:
        """Raises ContractError where the workspace shares bytes with an operand."""
        if workspace is None or not workspace.numel():
            return
        low, high = byte_span(workspace)
        for operand, tensor in zip(self.operands, tensors, strict=True):
            if tensor is None or not tensor.numel():
                continue
            operand_low, operand_high = byte_span(tensor)
            if low < operand_high and operand_low < high:
                raise ContractError(
                    "workspace",
                    f"memory of its own, apart from {operand.name}",
                    "overlapping byte ranges",
                )

    def _find_overlap(self, tensors: Sequence[torch.Tensor | None]) -> tuple[str, str] | None:
        """Names of a written operand and of one that it overlaps."""
        spans = [
            (operand, tensor, *byte_span(tensor))
            for operand, tensor in zip(self.operands, tensors, strict=True)
            if tensor is not None and tensor.numel()
        ]
        for (a, x, a_low, a_high), (b, y, b_low, b_high) in itertools.combinations(spans, 2):
            if not (a.is_mutated or b.is_mutated) or a_low >= b_high or b_low >= a_high:
                continue
            if _is_given_again(a, x, b, y) or are_interleaved(x, y):
                continue
            return (a.name, b.name) if a.is_mutated else (b.name, a.name)
        return None


def look_of(tensors: Iterable[object]) -> Hashable | None:
    """All that a check looks at, but for grad mode, without a tensor; None if an address is none.

    Tensors that look the same reach the same bytes in the same way.
    """
    looks: list[Hashable] = []
    for tensor in tensors:
        if tensor is None:
            looks.append(None)
        elif isinstance(tensor, torch.Tensor) and has_storage(tensor):
            place = (tensor.data_ptr(), tensor.device, tensor.dtype)
            looks.append((*place, tensor.shape, tensor.stride()))
        else:
            return None
    return tuple(looks)


def _is_given(operand: Operand, tensor: object) -> bool:
    """True for a tensor to check; ContractError where presence and declaration disagree."""
    if operand.is_declared and tensor is None:
        raise ContractError(operand.name, "a tensor, as declared at construction", None)
    if not operand.is_declared and tensor is not None:
        raise ContractError(operand.name, "None, since it was not declared", "a tensor")
    return tensor is not None


def _is_given_again(a: Operand, x: torch.Tensor, b: Operand, y: torch.Tensor) -> bool:
    """True for one tensor in two places whose operands allow it."""
    if b.name != a.may_be and a.name != b.may_be:
        return False
    same_place = x.data_ptr() == y.data_ptr() and x.dtype == y.dtype
    return same_place and x.shape == y.shape and x.stride() == y.stride()


def _spell_shape(shape: Shape, bound: Extents) -> str:
    parts = (f"{part} = {bound[part]}" if part in bound else str(part) for part in shape)
    return f"shape [{', '.join(parts)}]"


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
