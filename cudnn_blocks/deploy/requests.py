# SPDX-License-Identifier: Apache-2.0
"""The table of what can be asked for: one request class for every op and block."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import Field

from cudnn_blocks.deploy.attention import (
    GatedAttentionBlockRequest,
    GemmRequest,
    QkNormRopeRequest,
    QkvGateProjectionRequest,
    SdpaRequest,
    SigmoidGateRequest,
)
from cudnn_blocks.deploy.conv import (
    CausalConv1dUpdateRequest,
    CausalConv3dWithCacheRequest,
    Conv3dBiasResidualPadRequest,
    Conv3dRawRequest,
    Conv3dRmsNormSiluPadRequest,
    Conv3dRmsNormSiluRequest,
    RmsNormSiluPadRequest,
)
from cudnn_blocks.deploy.quantize import (
    DequantGemmRequest,
    DequantizeBlockRequest,
    QuantizeBlockRequest,
    QuantizeFp8Request,
)
from cudnn_blocks.deploy.request import Request

AnyRequest = Annotated[
    CausalConv1dUpdateRequest
    | CausalConv3dWithCacheRequest
    | Conv3dBiasResidualPadRequest
    | Conv3dRawRequest
    | Conv3dRmsNormSiluPadRequest
    | Conv3dRmsNormSiluRequest
    | DequantGemmRequest
    | DequantizeBlockRequest
    | GatedAttentionBlockRequest
    | GemmRequest
    | QkNormRopeRequest
    | QkvGateProjectionRequest
    | QuantizeBlockRequest
    | QuantizeFp8Request
    | RmsNormSiluPadRequest
    | SdpaRequest
    | SigmoidGateRequest,
    Field(discriminator="op"),
]
REQUESTS: tuple[type[Request], ...] = get_args(get_args(AnyRequest)[0])
"""In the order of their names."""
