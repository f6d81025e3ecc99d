# SPDX-License-Identifier: Apache-2.0
"""Conv3dRaw and ``ops.conv3d_raw``: the convolution alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cudnn_blocks.api_base import Sample
from cudnn_blocks.geometry.conv3d_shapes import conv3d_raw_shapes
from cudnn_blocks.ops.conv3d_family import ValidConv3dOp, geometry_of_call
from cudnn_blocks.ops.functional import FunctionalOp
from cudnn_blocks.stages.conv3d.stage import RAW
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target


class Conv3dRaw(ValidConv3dOp):
    """A valid 3x3x3 convolution: ``output = B(Conv3D(input, packed_weight))``.

    Rounding: FP32 accumulation, one rounding to BF16 (``B``). The order of a sum depends on Ci and
    Co alone, so a clip gives the same bits however it is cut into chunks.

    Every operand is BF16, contiguous and 16-byte aligned. N, T, H and W are dynamic: a plan takes
    them up to its samples' extents, for which its tile is chosen; N = 0 is an empty result.

    Args:
        sample_input: ``[N, T, H, W, Ci]`` with T, H, W >= 3.
        sample_packed_weight: ``[Co, 3, 3, 3, ceil64(Ci)]`` of ``pack_conv3d_weight``.
        sample_output: ``[N, T-2, H-2, W-2, Co]``.
        zero_leading_frames: 0 to 2 leading planes of ``input`` that count as zero, never read.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``conv3d``.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: output.

    Raises:
        ContractError: a tensor breaks the contract, or the output overlaps another operand.
        NotServedError: channels or a size without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = Conv3dRaw(x, packed_weight, output)
        >>> plan.compile()
        >>> plan.execute(x, packed_weight, output)

    Source: behaviour after the Conv3D family of cudnn-frontend; no code taken.
    """

    op_name = "conv3d-raw"
    operand_names = ("input", "packed_weight", "output")
    required_names = frozenset(operand_names)
    written_names = frozenset({"output"})
    epilogue = RAW

    def __init__(
        self,
        sample_input: Sample,
        sample_packed_weight: Sample,
        sample_output: Sample,
        *,
        zero_leading_frames: int = 0,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        samples = {
            "input": sample_input,
            "packed_weight": sample_packed_weight,
            "output": sample_output,
        }
        super().__init__(
            samples, zero_leading_frames=zero_leading_frames, target=target, engines=engines
        )

    def execute(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        output: torch.Tensor,
        current_stream: StreamLike | None = None,
    ) -> None:
        """One convolution; see the class for every operand."""
        self._launch((input, packed_weight, output), current_stream)

    def _shapes(self, input_shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        return conv3d_raw_shapes(self.geometry, input_shape)


def conv3d_raw(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    current_stream: StreamLike | None = None,
    *,
    zero_leading_frames: int = 0,
) -> torch.Tensor:
    """A valid 3x3x3 convolution; operands, rounding and errors are those of :class:`Conv3dRaw`.

    Args:
        input: ``[N, T, H, W, Ci]``.
        packed_weight: of ``pack_conv3d_weight``.
        current_stream: stream to launch on; None for torch's current stream of the input's device.
        zero_leading_frames: leading planes of ``input`` that count as zero and are never read.

    Returns:
        ``[N, T-2, H-2, W-2, Co]``, new, allocated on the stream of the launch.
    """
    results = _FUNCTION(input, packed_weight, zero_leading_frames, current_stream=current_stream)
    output = results["output"]
    assert output is not None
    return output


def _shapes_of(arguments: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    x, weight = arguments["input"], arguments["packed_weight"]
    return {"output": conv3d_raw_shapes(geometry_of_call(x, weight), x.shape)["output"]}


_FUNCTION = FunctionalOp(
    Conv3dRaw,
    "conv3d_raw(Tensor input, Tensor packed_weight, int zero_leading_frames=0) -> Tensor[]",
    outputs=("output",),
    shapes=_shapes_of,
    knobs=("zero_leading_frames",),
)
