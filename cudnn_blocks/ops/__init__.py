# SPDX-License-Identifier: Apache-2.0
"""Single operations: classes with preallocated ``execute``, and their functional forms."""

from cudnn_blocks.ops.causal_conv3d_op import CausalConv3dWithCache, causal_conv3d_with_cache
from cudnn_blocks.ops.conv1d_update import CausalConv1dUpdate, check_status
from cudnn_blocks.ops.conv1d_update_functional import causal_conv1d_update
from cudnn_blocks.ops.conv3d_bias_residual_pad_op import (
    Conv3dBiasResidualPad,
    conv3d_bias_residual_pad,
)
from cudnn_blocks.ops.conv3d_raw_op import Conv3dRaw, conv3d_raw
from cudnn_blocks.ops.conv3d_rmsnorm_silu_op import Conv3dRmsNormSilu, conv3d_rmsnorm_silu
from cudnn_blocks.ops.conv3d_rmsnorm_silu_pad_op import (
    Conv3dRmsNormSiluPad,
    conv3d_rmsnorm_silu_pad,
)
from cudnn_blocks.ops.dequant_gemm_op import DequantGemm, dequant_gemm
from cudnn_blocks.ops.dequantize_block_op import DequantizeBlock, dequantize_block
from cudnn_blocks.ops.gated_attention_functional import gated_attention
from cudnn_blocks.ops.gemm_op import Gemm, gemm
from cudnn_blocks.ops.qk_norm_rope_op import QkNormRope, qk_norm_rope
from cudnn_blocks.ops.qkv_gate_projection_op import QkvGateProjection, qkv_gate_projection
from cudnn_blocks.ops.quantize_block_op import QuantizeBlock, quantize_block
from cudnn_blocks.ops.quantize_fp8_op import QuantizeFp8, quantize_fp8
from cudnn_blocks.ops.rmsnorm_silu_pad_op import RmsNormSiluPad, rmsnorm_silu_pad
from cudnn_blocks.ops.sdpa_functional import sdpa_fwd
from cudnn_blocks.ops.sdpa_op import SdpaFwd
from cudnn_blocks.ops.sigmoid_gate_op import SigmoidGate, sigmoid_gate
from cudnn_blocks.reference.conv3d_packing import pack_causal_conv3d_weight, pack_conv3d_weight

__all__ = [
    "CausalConv1dUpdate",
    "CausalConv3dWithCache",
    "Conv3dBiasResidualPad",
    "Conv3dRaw",
    "Conv3dRmsNormSilu",
    "Conv3dRmsNormSiluPad",
    "DequantGemm",
    "DequantizeBlock",
    "Gemm",
    "QkNormRope",
    "QkvGateProjection",
    "QuantizeBlock",
    "QuantizeFp8",
    "RmsNormSiluPad",
    "SdpaFwd",
    "SigmoidGate",
    "causal_conv1d_update",
    "causal_conv3d_with_cache",
    "check_status",
    "conv3d_bias_residual_pad",
    "conv3d_raw",
    "conv3d_rmsnorm_silu",
    "conv3d_rmsnorm_silu_pad",
    "dequant_gemm",
    "dequantize_block",
    "gated_attention",
    "gemm",
    "pack_causal_conv3d_weight",
    "pack_conv3d_weight",
    "qk_norm_rope",
    "qkv_gate_projection",
    "quantize_block",
    "quantize_fp8",
    "rmsnorm_silu_pad",
    "sdpa_fwd",
    "sigmoid_gate",
]
