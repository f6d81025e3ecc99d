# SPDX-License-Identifier: Apache-2.0
"""Which kernels an arm launches, by the profiler: is a peer what its name says?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness.arm import Arm, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.harness.arm import Launch

CUDNN_MARKS = ("cudnn", "_fprop_implicit_gemm")
"""Parts of the names of cuDNN's convolution kernels, in lower case."""
FOREIGN_MARKS = ("vol2col", "im2col", "slow_conv", "conv_depthwise3d", "triton_tem_")
"""Parts of the names of other convolutions: torch's own, and Inductor's templates."""
NO_KERNELS = ("Memcpy", "Memset", "Context Sync", "Stream Sync", "Event Sync", "Activity Buffer")
"""First words of what else a trace holds of a device."""
NAME_LENGTH = 110
ATTEMPTS = 2


@dataclass(frozen=True)
class DeviceKernel:
    """One kernel of one launch."""

    name: str
    us: float


def device_kernels(launch: Launch) -> list[DeviceKernel]:
    """The kernels of one launch after a first one, in order; copies and fills left out.

    The first trace of a process can come back empty, so an empty one is taken again.
    """
    launch()
    for _ in range(ATTEMPTS):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            launch()
            torch.cuda.synchronize()
        kernels = [
            DeviceKernel(event.name, event.time_range.elapsed_us())
            for event in trace.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not event.name.startswith(NO_KERNELS)
        ]
        if kernels:
            return kernels
    return []


def is_cudnn(name: str) -> bool:
    """True for the name of a cuDNN convolution kernel."""
    return any(mark in name.lower() for mark in CUDNN_MARKS)


def cudnn_fault(kernels: Sequence[DeviceKernel]) -> str | None:
    """None where cuDNN did the convolution, else what did instead.

    A convolution outlasts every single kernel around it, so the longest one has to be cuDNN's: a
    conversion of layouts also carries cuDNN's name, and is short.
    """
    if not kernels:
        return "not cuDNN: the profiler saw no kernel"
    for name in (kernel.name for kernel in kernels if not is_cudnn(kernel.name)):
        if any(mark in name.lower() for mark in FOREIGN_MARKS):
            return f"not cuDNN: it launched {short_name(name)}"
    longest = longest_of(kernels)
    return None if is_cudnn(longest.name) else f"not cuDNN: longest is {short_name(longest.name)}"


def longest_of(kernels: Sequence[DeviceKernel]) -> DeviceKernel:
    """The kernel that took longest."""
    return max(kernels, key=lambda kernel: kernel.us)


def short_name(name: str) -> str:
    """A kernel's name for a table cell."""
    return name.removeprefix("void ")[:NAME_LENGTH]


def cudnn_arm(
    name: str, bind: Callable[[Any], Launch], sample: Any, what: str, role: Role = Role.PEER
) -> Arm:
    """An arm around a cuDNN convolution, proved by the profiler; its engine names the kernel.

    Args:
        name: the arm's name.
        bind: as of the arm.
        sample: a buffer set on a GPU.
        what: the engine's first words.
        role: the arm's role.
    """
    kernels = device_kernels(bind(sample))
    used = f"{short_name(longest_of(kernels).name)}, {len(kernels)} kernels" if kernels else "?"
    return Arm(name, role, f"{what}: {used}", bind, fault=cudnn_fault(kernels))
