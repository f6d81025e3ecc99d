# SPDX-License-Identifier: Apache-2.0
"""Fused GPU operations and model blocks: built once, probed before deployment, executed many times.

Public names load on first use; importing the package touches neither CUDA nor the CuTe DSL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudnn_blocks import ops
    from cudnn_blocks.api_base import APIBase
    from cudnn_blocks.errors import (
        BadSlotError,
        CaptureError,
        ContractError,
        CudaUnavailableError,
        DriverError,
        GradModeError,
        LifecycleError,
        NotServedError,
    )
    from cudnn_blocks.geometry import CausalConv1dGeometry
    from cudnn_blocks.ops import CausalConv1dUpdate, check_status
    from cudnn_blocks.support import SupportReport
    from cudnn_blocks.target import Target
    from cudnn_blocks.tensor_spec import TensorSpec

__version__ = "0.1.0"

_HOMES = {
    "cudnn_blocks.api_base": ("APIBase",),
    "cudnn_blocks.errors": (
        "BadSlotError",
        "CaptureError",
        "ContractError",
        "CudaUnavailableError",
        "DriverError",
        "GradModeError",
        "LifecycleError",
        "NotServedError",
    ),
    "cudnn_blocks.geometry": ("CausalConv1dGeometry",),
    "cudnn_blocks.ops": ("CausalConv1dUpdate", "check_status"),
    "cudnn_blocks.support": ("SupportReport",),
    "cudnn_blocks.target": ("Target",),
    "cudnn_blocks.tensor_spec": ("TensorSpec",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", "ops", *sorted(_HOME)]  # noqa: PLE0604, RUF022 - one table of names


def __getattr__(name: str) -> object:
    if name == "ops":
        return importlib.import_module("cudnn_blocks.ops")
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'cudnn_blocks' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
