# SPDX-License-Identifier: Apache-2.0
"""Conv3dBiasResidualPad and ``ops.conv3d_bias_residual_pad``: no norm, a zero row and column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cudnn_blocks.api_base import Sample
from cudnn_blocks.geometry.conv3d_shapes import conv3d_bias_residual_pad_shapes
from cudnn_blocks.ops.conv3d_family import ValidConv3dOp, geometry_of_call
from cudnn_blocks.ops.functional import FunctionalOp
from cudnn_blocks.stages.conv3d.stage import BIAS_RESIDUAL_PAD
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target


class Conv3dBiasResidualPad(ValidConv3dOp):
    """A valid 3x3x3 convolution, bias and residual, with a zero row below and column to the right.

    With ``B`` the rounding to BF16::

        value = B(B(Conv3D(input, packed_weight)) + bias)
        padded_output[:, :, :-1, :-1] = B(value + B(residual + residual_bias))    of what is given

    Rounding: FP32 between two ``B``; additions are not reassociated. The order of a sum depends on
    Ci and Co alone, so a clip gives the same bits however it is cut into chunks.

    Every operand is BF16, contiguous and 16-byte aligned. N, T, H and W are dynamic: a plan takes
    them up to its samples' extents, for which its tile is chosen; N = 0 is an empty result.

    Args:
        sample_input: ``[N, T, H, W, Ci]`` with T, H, W >= 3.
        sample_packed_weight: ``[Co, 3, 3, 3, ceil64(Ci)]`` of ``pack_conv3d_weight``.
        sample_bias: ``[Co]``.
        sample_residual: ``[N, T-2, H-2, W-2, Co]``.
        sample_padded_output: ``[N, T-2, H-1, W-1, Co]``.
        sample_residual_bias: ``[Co]``, or None.
        zero_leading_frames: 0 to 2 leading planes of ``input`` that count as zero, never read.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``conv3d``.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: padded_output.

    Raises:
        ContractError: a tensor breaks the contract, or the output overlaps another operand.
        NotServedError: channels or a size without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = Conv3dBiasResidualPad(x, packed_weight, bias, residual, padded)
        >>> plan.compile()
        >>> plan.execute(x, packed_weight, bias, residual, padded)

    Source: behaviour after the Conv3D family of cudnn-frontend; no code taken.
    """

    op_name = "conv3d-bias-residual-pad"
    operand_names = (
        "input",
        "packed_weight",
        "bias",
        "residual",
        "padded_output",
        "residual_bias",
    )
    required_names = frozenset(operand_names[:5])
    written_names = frozenset({"padded_output"})
    epilogue = BIAS_RESIDUAL_PAD

    def __init__(
        self,
        sample_input: Sample,
        sample_packed_weight: Sample,
        sample_bias: Sample,
        sample_residual: Sample,
        sample_padded_output: Sample,
        sample_residual_bias: Sample | None = None,
        *,
        zero_leading_frames: int = 0,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        samples = {
            "input": sample_input,
            "packed_weight": sample_packed_weight,
            "bias": sample_bias,
            "residual": sample_residual,
            "padded_output": sample_padded_output,
            "residual_bias": sample_residual_bias,
        }
        super().__init__(
            samples, zero_leading_frames=zero_leading_frames, target=target, engines=engines
        )

    def execute(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        bias: torch.Tensor,
        residual: torch.Tensor,
        padded_output: torch.Tensor,
        residual_bias: torch.Tensor | None = None,
        current_stream: StreamLike | None = None,
    ) -> None:
        """One convolution; see the class for every operand."""
        operands = (input, packed_weight, bias, residual, padded_output, residual_bias)
        self._launch(operands, current_stream)

    def _shapes(self, input_shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        has_residual_bias = "residual_bias" in self._specs
        return conv3d_bias_residual_pad_shapes(
            self.geometry, input_shape, has_residual_bias=has_residual_bias
        )


def conv3d_bias_residual_pad(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    residual_bias: torch.Tensor | None = None,
    current_stream: StreamLike | None = None,
    *,
    zero_leading_frames: int = 0,
) -> dict[str, torch.Tensor | None]:
    """Convolution, bias and residual, with a zero edge; as :class:`Conv3dBiasResidualPad` has it.

    Args:
        input: ``[N, T, H, W, Ci]``.
        packed_weight: of ``pack_conv3d_weight``.
        bias: ``[Co]``.
        residual: ``[N, T-2, H-2, W-2, Co]``.
        residual_bias: ``[Co]`` or None.
        current_stream: stream to launch on; None for torch's current stream of the input's device.
        zero_leading_frames: leading planes of ``input`` that count as zero and are never read.

    Returns:
        ``padded_output`` ``[N, T-2, H-1, W-1, Co]``, new, allocated on the stream of the launch.
    """
    arguments = (input, packed_weight, bias, residual, residual_bias)
    return _FUNCTION(*arguments, zero_leading_frames, current_stream=current_stream)


def _shapes_of(arguments: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    x = arguments["input"]
    geometry = geometry_of_call(x, arguments["packed_weight"])
    return {"padded_output": conv3d_bias_residual_pad_shapes(geometry, x.shape)["padded_output"]}


_FUNCTION = FunctionalOp(
    Conv3dBiasResidualPad,
    "conv3d_bias_residual_pad(Tensor input, Tensor packed_weight, Tensor bias, Tensor residual, "
    "Tensor? residual_bias=None, int zero_leading_frames=0) -> Tensor[]",
    outputs=("padded_output",),
    shapes=_shapes_of,
    knobs=("zero_leading_frames",),
)
