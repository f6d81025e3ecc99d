# SPDX-License-Identifier: Apache-2.0
"""TensorSpec: what a plan remembers of a sample tensor. The tensor itself is never retained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_KNOWN_ALIGNMENT_BYTES = 256


def row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of ``shape``."""
    stride: list[int] = []
    step = 1
    for extent in reversed(shape):
        stride.append(step)
        step *= max(extent, 1)
    return tuple(reversed(stride))


@dataclass(frozen=True)
class TensorSpec:
    """Dtype, shape, strides (elements), device and address alignment of a sample.

    A spec may stand wherever a sample tensor is asked for, and then says what a tensor would.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    alignment_bytes: int | None = None
    """Largest power of two, up to 256, that divides the address; None where there is none yet."""
    requires_grad: bool = False

    @classmethod
    def contiguous(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "meta"
    ) -> TensorSpec:
        """Spec of a contiguous tensor."""
        extents = tuple(shape)
        return cls(dtype, extents, row_major_stride(extents), torch.device(device))

    @classmethod
    def of(cls, name: str, sample: object) -> TensorSpec:
        """Spec of a real, meta or fake tensor, or the spec itself; TypeError for anything else."""
        if isinstance(sample, cls):
            return sample
        if not isinstance(sample, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor or TensorSpec, got {_type(sample)}")
        return cls(
            sample.dtype,
            tuple(sample.shape),
            tuple(sample.stride()),
            sample.device,
            _alignment_bytes(sample),
            sample.requires_grad,
        )

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {list(self.shape)} strides {self.stride} on {self.device}"


def has_storage(tensor: torch.Tensor) -> bool:
    """False for meta, fake and other wrapper tensors, whose address means nothing."""
    return tensor.device.type != "meta" and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _alignment_bytes(tensor: torch.Tensor) -> int | None:
    if not has_storage(tensor):
        return None
    address = tensor.data_ptr()
    lowest_bit = address & -address
    return min(lowest_bit, MAX_KNOWN_ALIGNMENT_BYTES) if lowest_bit else MAX_KNOWN_ALIGNMENT_BYTES


def _type(value: object) -> str:
    return type(value).__name__
