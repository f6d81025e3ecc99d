# SPDX-License-Identifier: Apache-2.0
"""Conv3dRmsNormSilu and ``ops.conv3d_rmsnorm_silu``: convolution, residual, norm and SiLU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cudnn_blocks.api_base import Sample
from cudnn_blocks.geometry.conv3d_shapes import ResidualMode, conv3d_rmsnorm_silu_shapes
from cudnn_blocks.ops.conv3d_family import ValidConv3dOp, geometry_of_call
from cudnn_blocks.ops.functional import FunctionalOp
from cudnn_blocks.stages.conv3d.stage import NORM
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target


class Conv3dRmsNormSilu(ValidConv3dOp):
    """A valid 3x3x3 convolution, bias, optional residual, L2 normalisation and SiLU.

    With ``B`` the rounding to BF16 and everything between two of them in FP32::

        value  = B(B(Conv3D(input, packed_weight)) + bias)
        value  = B(value + B(residual + residual_bias))      of what is given
        x      = B(value / max(sqrt(sum over c of value**2), 1e-12))
        x      = B(B(x * sqrt(Co)) * gamma)
        output = B(x / (1 + exp(-x))),  residual_output = value

    Rounding: the order of a sum depends on Ci and Co alone, so a clip gives the same bits however
    it is cut into chunks. The additions are not reassociated; the norm is of the stored ``value``.

    Every operand is BF16, contiguous and 16-byte aligned. N, T, H and W are dynamic: a plan takes
    them up to its samples' extents, for which its tile is chosen; N = 0 is an empty result.

    Args:
        sample_input: ``[N, T, H, W, Ci]`` with T, H, W >= 3.
        sample_packed_weight: ``[Co, 3, 3, 3, ceil64(Ci)]`` of ``pack_conv3d_weight``.
        sample_bias: ``[Co]``.
        sample_gamma: ``[Co]``.
        sample_output: ``[N, T-2, H-2, W-2, Co]``.
        sample_residual: shape of the output, or None.
        sample_residual_bias: ``[Co]``, or None; needs a residual.
        sample_residual_output: shape of the output, given exactly if the residual is.
        zero_leading_frames: 0 to 2 leading planes of ``input`` that count as zero, never read.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``conv3d``.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: output, residual_output.

    Raises:
        ContractError: a tensor breaks the contract, or written memory overlaps another operand.
        NotServedError: channels or a size without a row; for too many output channels to fuse the
            norm, run ``Conv3dRaw``, then ``RmsNormSiluPad``.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = Conv3dRmsNormSilu(x, packed_weight, bias, gamma, output)
        >>> plan.compile()
        >>> plan.execute(x, packed_weight, bias, gamma, output)

    Source: behaviour after the Conv3D family of cudnn-frontend; no code taken.
    """

    op_name = "conv3d-rmsnorm-silu"
    operand_names = (
        "input",
        "packed_weight",
        "bias",
        "gamma",
        "output",
        "residual",
        "residual_bias",
        "residual_output",
    )
    required_names = frozenset(operand_names[:5])
    written_names = frozenset({"output", "residual_output"})
    epilogue = NORM

    def __init__(
        self,
        sample_input: Sample,
        sample_packed_weight: Sample,
        sample_bias: Sample,
        sample_gamma: Sample,
        sample_output: Sample,
        sample_residual: Sample | None = None,
        sample_residual_bias: Sample | None = None,
        sample_residual_output: Sample | None = None,
        *,
        zero_leading_frames: int = 0,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        samples = {
            "input": sample_input,
            "packed_weight": sample_packed_weight,
            "bias": sample_bias,
            "gamma": sample_gamma,
            "output": sample_output,
            "residual": sample_residual,
            "residual_bias": sample_residual_bias,
            "residual_output": sample_residual_output,
        }
        super().__init__(
            samples, zero_leading_frames=zero_leading_frames, target=target, engines=engines
        )

    def execute(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        bias: torch.Tensor,
        gamma: torch.Tensor,
        output: torch.Tensor,
        residual: torch.Tensor | None = None,
        residual_bias: torch.Tensor | None = None,
        residual_output: torch.Tensor | None = None,
        current_stream: StreamLike | None = None,
    ) -> None:
        """One convolution; see the class for every operand."""
        self._launch(
            (
                input,
                packed_weight,
                bias,
                gamma,
                output,
                residual,
                residual_bias,
                residual_output,
            ),
            current_stream,
        )

    def _shapes(self, input_shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        return conv3d_rmsnorm_silu_shapes(self.geometry, input_shape, self._residual_mode())


def conv3d_rmsnorm_silu(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    gamma: torch.Tensor,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    current_stream: StreamLike | None = None,
    *,
    zero_leading_frames: int = 0,
) -> dict[str, torch.Tensor | None]:
    """Convolution, residual, norm and SiLU; as :class:`Conv3dRmsNormSilu` has it.

    Args:
        input: ``[N, T, H, W, Ci]``.
        packed_weight: of ``pack_conv3d_weight``.
        bias: ``[Co]``.
        gamma: ``[Co]``.
        residual: ``[N, T-2, H-2, W-2, Co]`` or None.
        residual_bias: ``[Co]`` or None; needs a residual.
        current_stream: stream to launch on; None for torch's current stream of the input's device.
        zero_leading_frames: leading planes of ``input`` that count as zero and are never read.

    Returns:
        ``output`` and, with a residual, ``residual_output``, else None. New tensors, allocated on
        the stream of the launch.
    """
    arguments = (input, packed_weight, bias, gamma, residual, residual_bias)
    return _FUNCTION(*arguments, zero_leading_frames, current_stream=current_stream)


def _shapes_of(arguments: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    x, residual = arguments["input"], arguments["residual"]
    mode = ResidualMode.of(residual, arguments["residual_bias"], residual)
    geometry = geometry_of_call(x, arguments["packed_weight"])
    shapes = conv3d_rmsnorm_silu_shapes(geometry, x.shape, mode)
    return {name: shapes[name] for name in shapes if name in Conv3dRmsNormSilu.written_names}


_FUNCTION = FunctionalOp(
    Conv3dRmsNormSilu,
    "conv3d_rmsnorm_silu(Tensor input, Tensor packed_weight, Tensor bias, Tensor gamma, "
    "Tensor? residual=None, Tensor? residual_bias=None, int zero_leading_frames=0) -> Tensor[]",
    outputs=("output", "residual_output"),
    shapes=_shapes_of,
    knobs=("zero_leading_frames",),
)
