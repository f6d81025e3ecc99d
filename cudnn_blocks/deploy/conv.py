# SPDX-License-Identifier: Apache-2.0
"""Requests for the convolutions, the causal decode update among them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from cudnn_blocks.api_base import APIBase
from cudnn_blocks.deploy.request import Dtype, Request, spec
from cudnn_blocks.geometry import (
    CausalConv1dGeometry,
    CausalConv3dGeometry,
    Conv3dGeometry,
    RmsNormSiluGeometry,
)
from cudnn_blocks.geometry import conv3d_shapes as shapes_of
from cudnn_blocks.geometry.conv3d_shapes import ResidualMode
from cudnn_blocks.ops import (
    CausalConv1dUpdate,
    CausalConv3dWithCache,
    Conv3dBiasResidualPad,
    Conv3dRaw,
    Conv3dRmsNormSilu,
    Conv3dRmsNormSiluPad,
    RmsNormSiluPad,
)
from cudnn_blocks.tensor_spec import TensorSpec

Shapes = dict[str, tuple[int, ...]]
HistoryFrames = Annotated[int, Field(description="frames kept of the chunk before, 0 to 2")]
ZeroLeadingFrames = Annotated[
    int, Field(description="leading input planes known to be zero, 0 to 2")
]
Residual = Literal["none", "add", "add_biased"]


class CausalConv1dUpdateRequest(Request):
    """The causal conv1d decode update."""

    op_class: ClassVar[type[APIBase]] = CausalConv1dUpdate
    op: Literal["causal-conv1d-update"]
    channels: Annotated[int, Field(description="D")]
    width: Annotated[int, Field(description="W")] = 4
    state_len: Annotated[int, Field(description="L")] = 4
    dtype: Dtype = "bf16"
    state_layout: Literal["compact", "channel-last"] = "compact"
    activation: Literal["identity", "silu"] = "silu"
    bias: bool = False
    indices: bool = False
    on_bad_index: Literal["trap", "report"] = "trap"
    batch: Annotated[int, Field(description="largest N")] = 1

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        row = spec(self.dtype, self.batch, self.channels)
        state = spec(self.dtype, self.batch, self.channels, self.state_len)
        if self.state_layout == "channel-last":
            stride = (self.channels * self.state_len, 1, self.channels)
            state = TensorSpec(state.dtype, state.shape, stride, state.device)
        return {
            "sample_x": row,
            "sample_conv_state": state,
            "sample_weight": spec(self.dtype, self.channels, self.width),
            "sample_out": row,
            "geometry": CausalConv1dGeometry(self.channels, self.width, self.state_len),
            "sample_bias": spec(self.dtype, self.channels) if self.bias else None,
            "sample_conv_state_indices": spec(torch.int32, self.batch) if self.indices else None,
            "activation": self.activation,
            "on_bad_index": self.on_bad_index,
        }


class _Frames(Request):
    """A clip; its extents are those of the op's input."""

    batch: Annotated[int, Field(description="largest N of the input")] = 1
    frames: Annotated[int, Field(description="largest T of the input")]
    height: Annotated[int, Field(description="largest H of the input")]
    width: Annotated[int, Field(description="largest W of the input")]

    def shapes(self) -> Shapes:
        """The shape of every operand that the op is given."""
        raise NotImplementedError

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        shapes = self.shapes().items()
        return {f"sample_{name}": spec(torch.bfloat16, *shape) for name, shape in shapes}


class _Conv3d(_Frames):
    """A valid 3x3x3 convolution over a padded NTHWC input."""

    in_channels: int
    out_channels: int
    zero_leading_frames: ZeroLeadingFrames = 0

    @property
    def geometry(self) -> Conv3dGeometry:
        """Channels."""
        return Conv3dGeometry(self.in_channels, self.out_channels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """``[N, T, H, W, Ci]``."""
        return (self.batch, self.frames, self.height, self.width, self.in_channels)

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        return {**super().arguments(), "zero_leading_frames": self.zero_leading_frames}


class Conv3dRawRequest(_Conv3d):
    """The convolution alone."""

    op_class: ClassVar[type[APIBase]] = Conv3dRaw
    op: Literal["conv3d-raw"]

    def shapes(self) -> Shapes:
        """See ``_Frames``."""
        return shapes_of.conv3d_raw_shapes(self.geometry, self.input_shape)


class Conv3dRmsNormSiluRequest(_Conv3d):
    """Convolution, bias, residual, norm and SiLU."""

    op_class: ClassVar[type[APIBase]] = Conv3dRmsNormSilu
    op: Literal["conv3d-rmsnorm-silu"]
    residual: Residual = "none"

    def shapes(self) -> Shapes:
        """See ``_Frames``."""
        mode = ResidualMode(self.residual)
        return shapes_of.conv3d_rmsnorm_silu_shapes(self.geometry, self.input_shape, mode)


class Conv3dRmsNormSiluPadRequest(_Conv3d):
    """The same into the padded input of the next convolution, and its cache."""

    op_class: ClassVar[type[APIBase]] = Conv3dRmsNormSiluPad
    op: Literal["conv3d-rmsnorm-silu-pad"]
    residual: Residual = "none"
    history_frames: HistoryFrames = 0

    def shapes(self) -> Shapes:
        """See ``_Frames``."""
        return shapes_of.conv3d_rmsnorm_silu_pad_shapes(
            self.geometry,
            self.input_shape,
            ResidualMode(self.residual),
            history_frames=self.history_frames,
        )

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        return {**super().arguments(), "history_frames": self.history_frames}


class Conv3dBiasResidualPadRequest(_Conv3d):
    """Convolution, bias and residual into a spatially padded output."""

    op_class: ClassVar[type[APIBase]] = Conv3dBiasResidualPad
    op: Literal["conv3d-bias-residual-pad"]
    residual_bias: bool = False

    def shapes(self) -> Shapes:
        """See ``_Frames``."""
        return shapes_of.conv3d_bias_residual_pad_shapes(
            self.geometry, self.input_shape, has_residual_bias=self.residual_bias
        )


class RmsNormSiluPadRequest(_Frames):
    """Norm, SiLU and causal padding of an activation."""

    op_class: ClassVar[type[APIBase]] = RmsNormSiluPad
    op: Literal["rmsnorm-silu-pad"]
    channels: int
    residual: Literal["none", "save_input", "add", "add_biased"] = "none"
    input_bias: bool = False
    history_frames: HistoryFrames = 0

    def shapes(self) -> Shapes:
        """See ``_Frames``."""
        geometry = RmsNormSiluGeometry(self.channels)
        shape = (self.batch, self.frames, self.height, self.width, self.channels)
        previous = geometry.previous_shape(shape, self.history_frames)
        return shapes_of.rmsnorm_silu_pad_shapes(
            geometry,
            shape,
            ResidualMode(self.residual),
            has_input_bias=self.input_bias,
            previous_shape=previous if self.history_frames else None,
        )


class CausalConv3dWithCacheRequest(_Frames):
    """The streaming causal convolution 12 -> 160."""

    op_class: ClassVar[type[APIBase]] = CausalConv3dWithCache
    op: Literal["causal-conv3d-with-cache"]
    history_frames: HistoryFrames = 0
    padded_input: Annotated[
        bool, Field(description="the caller brings the padded input; else the workspace holds it")
    ] = False

    def shapes(self) -> Shapes:
        """See ``_Frames``."""
        geometry = CausalConv3dGeometry()
        shape = (self.batch, geometry.in_channels, self.frames, self.height, self.width)
        previous = geometry.previous_shape(shape, self.history_frames)
        return shapes_of.causal_conv3d_with_cache_shapes(
            geometry,
            shape,
            has_padded_input=self.padded_input,
            previous_shape=previous if self.history_frames else None,
        )

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        return {"sample_padded_input": None, **super().arguments()}
