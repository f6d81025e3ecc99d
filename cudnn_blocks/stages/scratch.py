# SPDX-License-Identifier: Apache-2.0
"""BF16 values that stages of several launches hold between them, in the engine's scratch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from cudnn_blocks.workspace import REGION_ALIGNMENT_BYTES

VALUES = torch.bfloat16


def padded_bytes(shape: Sequence[int]) -> int:
    """Of a tensor, up to the next region."""
    size_bytes = math.prod(shape) * VALUES.itemsize
    return -(-size_bytes // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES


def carve(scratch: torch.Tensor, shapes: Iterable[Sequence[int]]) -> list[torch.Tensor]:
    """Contiguous tensors, one after the other."""
    start, found = 0, []
    for shape in shapes:
        end = start + math.prod(shape) * VALUES.itemsize
        found.append(scratch[start:end].view(VALUES).view(tuple(shape)))
        start += padded_bytes(shape)
    return found
