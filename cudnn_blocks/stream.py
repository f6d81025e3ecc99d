# SPDX-License-Identifier: Apache-2.0
"""resolve_stream: the one place where a caller's stream becomes the handle to launch on."""

from __future__ import annotations

from typing import TypeAlias

import torch

from cudnn_blocks.errors import ContractError

StreamLike: TypeAlias = object
"""A ``torch.cuda.Stream``, a CUDA driver stream (``__cuda_stream__`` or ``int()``), or an int."""


def ambient_stream(device_index: int) -> int:
    """Handle of torch's current stream on a device, in about 0.1 us."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def resolve_stream(current_stream: StreamLike | None, device_index: int) -> int:
    """The driver handle to launch on.

    Args:
        current_stream: None for torch's current stream of the device; a ``torch.cuda.Stream`` of
            that device; any object with ``__cuda_stream__``; a ``cuda.bindings`` ``CUstream``; or
            an integer handle. Handles carry no device, so one of another device is not noticed.
        device_index: the device that the operands are on.

    Raises:
        ContractError: a torch stream of another device.
        TypeError: anything else.
    """
    if current_stream is None:
        return ambient_stream(device_index)
    if isinstance(current_stream, torch.cuda.Stream):
        if current_stream.device_index != device_index:
            raise ContractError(
                "current_stream",
                f"a stream of cuda:{device_index}",
                f"a stream of {current_stream.device}",
            )
        return int(current_stream.cuda_stream)
    protocol = getattr(current_stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    is_driver_stream = type(current_stream).__name__ in ("CUstream", "cudaStream_t")
    if is_driver_stream or (type(current_stream) is int and current_stream >= 0):
        return int(current_stream)  # type: ignore[call-overload, no-any-return]
    raise TypeError(
        "current_stream: expected a torch.cuda.Stream, a CUDA driver stream or its integer handle, "
        f"got {type(current_stream).__name__}"
    )


def as_torch_stream(handle: int, device_index: int) -> torch.cuda.Stream:
    """A torch stream for a handle; the legacy default stream is torch's own object for it."""
    device = torch.device("cuda", device_index)
    if handle in (0, 1):
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)


def is_capturing() -> bool:
    """True while torch's current stream records a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
