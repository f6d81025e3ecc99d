# SPDX-License-Identifier: Apache-2.0
"""Tensors for tests: exact clones, guarded copies, poison, comparison of bits."""

from __future__ import annotations

import torch

from cudnn_blocks.workspace import GuardedBuffer


def clone_exact(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides in memory of its own; gaps hold NaN or -1."""
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    storage_bytes(copy).fill_(0xFF)
    return copy.copy_(tensor)


def guarded_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, GuardedBuffer]:
    """The same between two guards; ``GuardedBuffer.is_intact()`` says if they survived."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    buffer = GuardedBuffer(size_bytes, tensor.device)
    copy = buffer.bytes.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    copy.copy_(tensor)
    return copy, buffer


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte of the tensor's storage, gaps between its elements included."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values as integers, so that NaN payloads and signs of zero count."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integer[tensor.element_size()])


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    a, b = bits(actual), bits(expected.to(actual.device))
    if torch.equal(a, b):
        return
    wrong = (a != b).nonzero()
    where = tuple(wrong[0].tolist())
    raise AssertionError(
        f"{what}: {len(wrong)} of {a.numel()} elements differ, the first at {list(where)}: "
        f"{actual[where].item()} ({a[where].item():#x}) for "
        f"{expected[where].item()} ({b[where].item():#x})"
    )


def random_bits(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Any 16-bit patterns, four NaN payloads of either sign at the front."""
    pattern = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
    payloads = torch.tensor([0x7FC1, -1, 0x7FFD, -0x40], dtype=torch.int16)
    pattern.view(-1)[:4] = payloads.to(device)
    return pattern.view(dtype)


def poison_allocator(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Leaves NaN in the block that the next ``torch.empty`` of this size is likely to get."""
    poison = torch.full(shape, float("nan"), dtype=dtype, device=device)
    del poison
