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
    from cudnn_blocks.artifacts.warm_up import warm
    from cudnn_blocks.blocks import GatedAttentionBlockFwd
    from cudnn_blocks.errors import (
        BadSlotError,
        BundleError,
        CaptureError,
        CompileRefusedError,
        ContractError,
        CudaUnavailableError,
        DriverError,
        GradModeError,
        LifecycleError,
        LinkError,
        NotServedError,
    )
    from cudnn_blocks.geometry import (
        CausalConv1dGeometry,
        CausalConv3dGeometry,
        Conv3dGeometry,
        GatedAttentionGeometry,
        ProjBlock,
        RmsNormSiluGeometry,
        SdpaGeometry,
    )
    from cudnn_blocks.ops import (
        CausalConv1dUpdate,
        CausalConv3dWithCache,
        Conv3dBiasResidualPad,
        Conv3dRaw,
        Conv3dRmsNormSilu,
        Conv3dRmsNormSiluPad,
        DequantGemm,
        DequantizeBlock,
        Gemm,
        QkNormRope,
        QkvGateProjection,
        QuantizeBlock,
        QuantizeFp8,
        RmsNormSiluPad,
        SdpaFwd,
        SigmoidGate,
        check_status,
        pack_causal_conv3d_weight,
        pack_conv3d_weight,
    )
    from cudnn_blocks.quant_spec import Fp4Format, MxQuantSpec, QuantSpec
    from cudnn_blocks.reference.gated_attention_weights import (
        build_fused_qkvg_weight,
        qkvg_from_hf,
    )
    from cudnn_blocks.support import SupportReport
    from cudnn_blocks.target import Target
    from cudnn_blocks.tensor_spec import TensorSpec

__version__ = "0.1.0"

__all__ = [
    "APIBase",
    "BadSlotError",
    "BundleError",
    "CaptureError",
    "CausalConv1dGeometry",
    "CausalConv1dUpdate",
    "CausalConv3dGeometry",
    "CausalConv3dWithCache",
    "CompileRefusedError",
    "ContractError",
    "Conv3dBiasResidualPad",
    "Conv3dGeometry",
    "Conv3dRaw",
    "Conv3dRmsNormSilu",
    "Conv3dRmsNormSiluPad",
    "CudaUnavailableError",
    "DequantGemm",
    "DequantizeBlock",
    "DriverError",
    "Fp4Format",
    "GatedAttentionBlockFwd",
    "GatedAttentionGeometry",
    "Gemm",
    "GradModeError",
    "LifecycleError",
    "LinkError",
    "MxQuantSpec",
    "NotServedError",
    "ProjBlock",
    "QkNormRope",
    "QkvGateProjection",
    "QuantSpec",
    "QuantizeBlock",
    "QuantizeFp8",
    "RmsNormSiluGeometry",
    "RmsNormSiluPad",
    "SdpaFwd",
    "SdpaGeometry",
    "SigmoidGate",
    "SupportReport",
    "Target",
    "TensorSpec",
    "__version__",
    "build_fused_qkvg_weight",
    "check_status",
    "ops",
    "pack_causal_conv3d_weight",
    "pack_conv3d_weight",
    "qkvg_from_hf",
    "warm",
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
    "DequantGemm": "ops",
    "DequantizeBlock": "ops",
    "Fp4Format": "quant_spec",
    "GatedAttentionBlockFwd": "blocks",
    "GatedAttentionGeometry": "geometry",
    "Gemm": "ops",
    "MxQuantSpec": "quant_spec",
    "ProjBlock": "geometry",
    "QkNormRope": "ops",
    "QkvGateProjection": "ops",
    "QuantSpec": "quant_spec",
    "QuantizeBlock": "ops",
    "QuantizeFp8": "ops",
    "RmsNormSiluGeometry": "geometry",
    "RmsNormSiluPad": "ops",
    "SdpaFwd": "ops",
    "SdpaGeometry": "geometry",
    "SigmoidGate": "ops",
    "SupportReport": "support",
    "Target": "target",
    "TensorSpec": "tensor_spec",
    "build_fused_qkvg_weight": "reference.gated_attention_weights",
    "check_status": "ops",
    "pack_causal_conv3d_weight": "ops",
    "pack_conv3d_weight": "ops",
    "qkvg_from_hf": "reference.gated_attention_weights",
    "warm": "artifacts.warm_up",
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
