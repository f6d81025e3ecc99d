# SPDX-License-Identifier: Apache-2.0
"""Allocation on the stream of the launch, for functional forms that make their own outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cudnn_blocks.stream import StreamLike, ambient_stream, as_torch_stream, resolve_stream

Run = Callable[[StreamLike | None], list[torch.Tensor]]


def run_on_stream(
    operand: torch.Tensor, current_stream: StreamLike | None, run: Run
) -> list[torch.Tensor]:
    """Allocates and launches on one stream, so that no memory is reused while it is in use.

    Args:
        operand: a tensor of the call; says which device.
        current_stream: the caller's; None for torch's current stream of the device.
        run: allocates the outputs, launches on the stream that it is given, returns the outputs.
            Scratch that it allocates may die with it.

    Returns:
        What ``run`` returned, known to the allocator as in use on torch's current stream too.
    """
    if current_stream is None or not operand.is_cuda:
        return run(None)
    index = operand.get_device()
    handle = resolve_stream(current_stream, index)
    with torch.cuda.stream(as_torch_stream(handle, index)):
        outputs = run(handle)
    if handle != ambient_stream(index):
        ambient = torch.cuda.current_stream(index)
        for output in outputs:
            output.record_stream(ambient)
    return outputs
