# SPDX-License-Identifier: Apache-2.0
"""Names and argument orders of nvidia-cudnn-frontend 1.32.0 (``cudnn``), for what is served here.

A caller of that package changes its import to this module. Every name is another name of an object
of this package; docs/integrations/upstream_names.md has the table, and where the two differ.
"""

from __future__ import annotations

from cudnn_blocks import ops
from cudnn_blocks.blocks import GatedAttentionBlockFwd
from cudnn_blocks.geometry import GatedAttentionGeometry as GatedAttentionBlockGeometry
from cudnn_blocks.geometry import ProjBlock
from cudnn_blocks.geometry.gated_attention import QKVG_BAND_MULTIPLE as QKVG_TILE_ALIGN
from cudnn_blocks.ops import CausalConv3dWithCache as CausalConv3dWithCacheSm100
from cudnn_blocks.ops import Conv3dBiasResidualPad as Conv3dBiasResidualPadSm100
from cudnn_blocks.ops import Conv3dRaw as Conv3dRawSm100
from cudnn_blocks.ops import Conv3dRmsNormSilu as Conv3dRmsNormSiluSm100
from cudnn_blocks.ops import Conv3dRmsNormSiluPad as Conv3dRmsNormSiluPadSm100
from cudnn_blocks.ops import RmsNormSiluPad as RmsNormSiluPadSm100
from cudnn_blocks.ops import causal_conv1d_update
from cudnn_blocks.ops import causal_conv3d_with_cache as causal_conv3d_with_cache_wrapper_sm100
from cudnn_blocks.ops import conv3d_bias_residual_pad as conv3d_bias_residual_pad_wrapper_sm100
from cudnn_blocks.ops import conv3d_raw as conv3d_raw_wrapper_sm100
from cudnn_blocks.ops import conv3d_rmsnorm_silu as conv3d_rmsnorm_silu_wrapper_sm100
from cudnn_blocks.ops import conv3d_rmsnorm_silu_pad as conv3d_rmsnorm_silu_pad_wrapper_sm100
from cudnn_blocks.ops import gated_attention as gated_attention_block_forward
from cudnn_blocks.ops import pack_causal_conv3d_weight as pack_causal_conv3d_weight_sm100
from cudnn_blocks.ops import pack_conv3d_weight as pack_conv3d_weight_sm100
from cudnn_blocks.ops import rmsnorm_silu_pad as rmsnorm_silu_pad_wrapper_sm100
from cudnn_blocks.quant_spec import Fp4Format, MxQuantSpec, QuantSpec
from cudnn_blocks.reference.gated_attention_weights import build_fused_qkvg_weight, qkvg_from_hf

__all__ = [
    "QKVG_TILE_ALIGN",
    "CausalConv3dWithCacheSm100",
    "Conv3dBiasResidualPadSm100",
    "Conv3dRawSm100",
    "Conv3dRmsNormSiluPadSm100",
    "Conv3dRmsNormSiluSm100",
    "Fp4Format",
    "GatedAttentionBlockFwd",
    "GatedAttentionBlockGeometry",
    "MxQuantSpec",
    "ProjBlock",
    "QuantSpec",
    "RmsNormSiluPadSm100",
    "build_fused_qkvg_weight",
    "causal_conv1d_update",
    "causal_conv3d_with_cache_wrapper_sm100",
    "conv3d_bias_residual_pad_wrapper_sm100",
    "conv3d_raw_wrapper_sm100",
    "conv3d_rmsnorm_silu_pad_wrapper_sm100",
    "conv3d_rmsnorm_silu_wrapper_sm100",
    "gated_attention_block_forward",
    "ops",
    "pack_causal_conv3d_weight_sm100",
    "pack_conv3d_weight_sm100",
    "qkvg_from_hf",
    "rmsnorm_silu_pad_wrapper_sm100",
]
