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
    from cudnn_blocks.geometry import (
        CausalConv1dGeometry,
        CausalConv3dGeometry,
        Conv3dGeometry,
        RmsNormSiluGeometry,
    )
    from cudnn_blocks.ops import (
        CausalConv1dUpdate,
        CausalConv3dWithCache,
        Conv3dBiasResidualPad,
        Conv3dRaw,
        Conv3dRmsNormSilu,
        Conv3dRmsNormSiluPad,
        RmsNormSiluPad,
        check_status,
        pack_causal_conv3d_weight,
        pack_conv3d_weight,
    )
    from cudnn_blocks.support import SupportReport
    from cudnn_blocks.target import Target
    from cudnn_blocks.tensor_spec import TensorSpec

__version__ = "0.1.0"

__all__ = [
    "APIBase",
    "BadSlotError",
    "CaptureError",
    "CausalConv1dGeometry",
    "CausalConv1dUpdate",
    "CausalConv3dGeometry",
    "CausalConv3dWithCache",
    "ContractError",
    "Conv3dBiasResidualPad",
    "Conv3dGeometry",
    "Conv3dRaw",
    "Conv3dRmsNormSilu",
    "Conv3dRmsNormSiluPad",
    "CudaUnavailableError",
    "DriverError",
    "GradModeError",
    "LifecycleError",
    "NotServedError",
    "RmsNormSiluGeometry",
    "RmsNormSiluPad",
    "SupportReport",
    "Target",
    "TensorSpec",
    "__version__",
    "check_status",
    "ops",
    "pack_causal_conv3d_weight",
    "pack_conv3d_weight",
]

# Where the names that do not come from the errors module live.
_HOMES = {
    "APIBase": "api_base",
    "CausalConv1dGeometry": "geometry",
    "CausalConv1dUpdate": "ops",
    "CausalConv3dGeometry": "geometry",
    "CausalConv3dWithCache": "ops",
    "Conv3dBiasResidualPad": "ops",
    "Conv3dGeometry": "geometry",
    "Conv3dRaw": "ops",
    "Conv3dRmsNormSilu": "ops",
    "Conv3dRmsNormSiluPad": "ops",
    "RmsNormSiluGeometry": "geometry",
    "RmsNormSiluPad": "ops",
    "SupportReport": "support",
    "Target": "target",
    "TensorSpec": "tensor_spec",
    "check_status": "ops",
    "pack_causal_conv3d_weight": "ops",
    "pack_conv3d_weight": "ops",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'cudnn_blocks' has no attribute {name!r}")
    if name == "ops":
        return importlib.import_module("cudnn_blocks.ops")
    home = importlib.import_module(f"cudnn_blocks.{_HOMES.get(name, 'errors')}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
