# SPDX-License-Identifier: Apache-2.0
"""Rows at one pitch to rows at another on a GPU: a copy of the CUDA runtime, which needs no kernel.

The runtime is that of cuda-python, imported when it is first needed: the package works without.
"""

from __future__ import annotations

from types import ModuleType

import torch

from cudnn_blocks.errors import DriverError


def load_runtime() -> ModuleType:
    """Imports the runtime, so that a first copy has nothing to load."""
    from cuda.bindings import runtime

    return runtime


def copy_rows(source: torch.Tensor, destination: torch.Tensor, stream: int) -> None:
    """``destination = source``, both ``[B, S, columns]`` of one dtype; capturable, no allocation.

    Args:
        source: its rows over B and S lie at the pitch of axis 1.
        destination: as source; shares no byte with it.
        stream: handle.

    Raises:
        DriverError: the runtime refused.
    """
    runtime = load_runtime()
    batch, tokens, columns = source.shape
    size = source.element_size()
    with torch.cuda.device(destination.device):  # handles of default streams carry no device
        (error,) = runtime.cudaMemcpy2DAsync(
            destination.data_ptr(),
            destination.stride(1) * size,
            source.data_ptr(),
            source.stride(1) * size,
            columns * size,
            batch * tokens,
            runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice,
            stream,
        )
    if error != runtime.cudaError_t.cudaSuccess:
        raise DriverError(f"copy of {batch * tokens} rows of {columns * size} bytes: {error.name}")
