# SPDX-License-Identifier: Apache-2.0
"""Target: what a plan compiles for, with the hardware facts that the choice of a kernel needs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from cudnn_blocks.errors import ContractError, CudaUnavailableError

KIB = 1024


@dataclass(frozen=True)
class Target:
    """``cpu``, or one GPU architecture.

    Shared-memory limits are the CUDA programming guide's, per compute capability.
    """

    name: str
    """``cpu`` or an architecture name such as ``sm_90a``."""
    sm: int
    """Compute capability times ten; 0 for ``cpu``."""
    smem_per_cta_bytes: int
    """Most shared memory that one CTA can have."""
    num_sms: int
    """Streaming multiprocessors of the device, or of the largest common part when only named."""

    @property
    def is_cpu(self) -> bool:
        """True for the target of the reference engine."""
        return self.sm == 0

    @classmethod
    def parse(cls, target: str | Target) -> Target:
        """A target by name; ``sm_90`` and ``sm_90a`` are the same."""
        if isinstance(target, Target):
            return target
        if not isinstance(target, str):
            raise TypeError(f"target: expected str or Target, got {type(target).__name__}")
        found = _BY_NAME.get(target.removesuffix("a"))
        if found is None:
            raise ContractError("target", f"one of {', '.join(TARGET_NAMES)}", repr(target))
        return found

    @classmethod
    def of_device(cls, device: torch.device) -> Target:
        """The target of a device of this process; the facts are read once."""
        if device.type == "cpu":
            return CPU
        if device.type != "cuda":
            raise ContractError(
                "target",
                "a cpu or cuda device, or target= when the samples are on meta",
                device.type,
            )
        if not torch.cuda.is_available():
            raise CudaUnavailableError(f"{device} was asked for and torch sees no CUDA device")
        index = device.index if device.index is not None else torch.cuda.current_device()
        return _of_index(index)

    def __str__(self) -> str:
        return self.name


def _gpu(name: str, smem_kib: int, num_sms: int) -> Target:
    return Target(name, int(name.removeprefix("sm_").removesuffix("a")), smem_kib * KIB, num_sms)


CPU = Target("cpu", 0, 0, 0)
_KNOWN = (
    CPU,
    _gpu("sm_80", 163, 108),
    _gpu("sm_86", 99, 84),
    _gpu("sm_87", 163, 16),
    _gpu("sm_89", 99, 142),
    _gpu("sm_90a", 227, 132),
    _gpu("sm_100a", 227, 148),
    _gpu("sm_103a", 227, 160),
    _gpu("sm_110a", 227, 20),
    _gpu("sm_120a", 99, 188),
    _gpu("sm_121a", 99, 48),
)
_BY_NAME = {target.name.removesuffix("a"): target for target in _KNOWN}
TARGET_NAMES = tuple(target.name for target in _KNOWN)
GPU_TARGET_NAMES = TARGET_NAMES[1:]


@functools.cache
def _of_index(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    capability = f"sm_{properties.major}{properties.minor}"
    known = _BY_NAME.get(capability)
    if known is None:
        raise ContractError("target", f"one of {', '.join(GPU_TARGET_NAMES)}", capability)
    return Target(
        known.name,
        known.sm,
        known.smem_per_cta_bytes,
        properties.multi_processor_count,
    )
