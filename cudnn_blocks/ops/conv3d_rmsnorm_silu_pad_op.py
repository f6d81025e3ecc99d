# SPDX-License-Identifier: Apache-2.0
"""Conv3dRmsNormSiluPad and ``ops.conv3d_rmsnorm_silu_pad``: into the next convolution's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cudnn_blocks.api_base import Sample
from cudnn_blocks.geometry.conv3d_shapes import ResidualMode, conv3d_rmsnorm_silu_pad_shapes
from cudnn_blocks.ops.conv3d_family import ValidConv3dOp, geometry_of_call
from cudnn_blocks.ops.functional import FunctionalOp
from cudnn_blocks.stages.conv3d.stage import NORM_PAD
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target


class Conv3dRmsNormSiluPad(ValidConv3dOp):
    """As ``Conv3dRmsNormSilu``, into the padded input of the next convolution and a cache.

    ``activated`` below is what ``Conv3dRmsNormSilu`` calls ``output``, rounded alike, and ``P`` is
    ``history_frames``::

        padded_output[:, 2:],     interiors             = activated
        padded_output[:, :2-P],   interiors             = 0
        padded_output[:, 2-P:2],  interiors             untouched: the caller's history
        padded_output,            borders of all planes = 0
        cache_output,             last min(2, T-2) frames = the last frames of activated
        cache_output,             frames before those   untouched: the caller's history

    The caller copies its history, which is activated already, before or after the call: the copies
    and the op touch different memory.

    Every operand is BF16, contiguous and 16-byte aligned. N, T, H and W are dynamic: a plan takes
    them up to its samples' extents, for which its tile is chosen; N = 0 is an empty result.

    Args:
        sample_input: ``[N, T, H, W, Ci]`` with T, H, W >= 3.
        sample_packed_weight: ``[Co, 3, 3, 3, ceil64(Ci)]`` of ``pack_conv3d_weight``.
        sample_bias: ``[Co]``.
        sample_gamma: ``[Co]``.
        sample_padded_output: ``[N, T, H, W, Co]``.
        sample_cache_output: ``[N, min(2, T-2+P), H-2, W-2, Co]``.
        history_frames: P, 0 to 2.
        sample_residual: ``[N, T-2, H-2, W-2, Co]``, or None.
        sample_residual_bias: ``[Co]``, or None; needs a residual.
        sample_residual_output: shape of the residual, given exactly if the residual is.
        zero_leading_frames: 0 to 2 leading planes of ``input`` that count as zero, never read.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``conv3d``.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: padded_output and cache_output as above, residual_output.

    Raises:
        ContractError: a tensor breaks the contract, or written memory overlaps another operand.
        NotServedError: channels or a size without a row; for too many output channels to fuse the
            norm, run ``Conv3dRaw``, then ``RmsNormSiluPad``.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = Conv3dRmsNormSiluPad(x, packed_weight, bias, gamma, padded, cache, 2)
        >>> plan.compile()
        >>> padded[:, :2, 1:-1, 1:-1] = history
        >>> plan.execute(x, packed_weight, bias, gamma, padded, cache)

    Source: behaviour after the Conv3D family of cudnn-frontend; no code taken.
    """

    op_name = "conv3d-rmsnorm-silu-pad"
    operand_names = (
        "input",
        "packed_weight",
        "bias",
        "gamma",
        "padded_output",
        "cache_output",
        "residual",
        "residual_bias",
        "residual_output",
    )
    required_names = frozenset(operand_names[:6])
    written_names = frozenset({"padded_output", "cache_output", "residual_output"})
    epilogue = NORM_PAD

    def __init__(
        self,
        sample_input: Sample,
        sample_packed_weight: Sample,
        sample_bias: Sample,
        sample_gamma: Sample,
        sample_padded_output: Sample,
        sample_cache_output: Sample,
        history_frames: int = 0,
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
            "padded_output": sample_padded_output,
            "cache_output": sample_cache_output,
            "residual": sample_residual,
            "residual_bias": sample_residual_bias,
            "residual_output": sample_residual_output,
        }
        super().__init__(
            samples,
            zero_leading_frames=zero_leading_frames,
            history_frames=history_frames,
            target=target,
            engines=engines,
        )

    def execute(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        bias: torch.Tensor,
        gamma: torch.Tensor,
        padded_output: torch.Tensor,
        cache_output: torch.Tensor,
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
                padded_output,
                cache_output,
                residual,
                residual_bias,
                residual_output,
            ),
            current_stream,
        )

    def _shapes(self, input_shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        return conv3d_rmsnorm_silu_pad_shapes(
            self.geometry,
            input_shape,
            self._residual_mode(),
            history_frames=self._history_frames,
        )


def conv3d_rmsnorm_silu_pad(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    bias: torch.Tensor,
    gamma: torch.Tensor,
    history_frames: int = 0,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    current_stream: StreamLike | None = None,
    *,
    zero_leading_frames: int = 0,
) -> dict[str, torch.Tensor | None]:
    """Convolution, residual, norm and SiLU into a padded tensor; see :class:`Conv3dRmsNormSiluPad`.

    Args:
        input: ``[N, T, H, W, Ci]``.
        packed_weight: of ``pack_conv3d_weight``.
        bias: ``[Co]``.
        gamma: ``[Co]``.
        history_frames: P, 0 to 2 planes of history that the caller copies into the results. Until
            then ``padded_output[:, 2-P:2, 1:-1, 1:-1]`` and the frames of ``cache_output`` before
            the last ``min(2, T-2)`` are uninitialised.
        residual: ``[N, T-2, H-2, W-2, Co]`` or None.
        residual_bias: ``[Co]`` or None; needs a residual.
        current_stream: stream to launch on; None for torch's current stream of the input's device.
        zero_leading_frames: leading planes of ``input`` that count as zero and are never read.

    Returns:
        ``padded_output``, ``cache_output`` and, with a residual, ``residual_output``, else None.
        New tensors, allocated on the stream of the launch.
    """
    arguments = (input, packed_weight, bias, gamma, residual, residual_bias)
    knobs = (history_frames, zero_leading_frames)
    return _FUNCTION(*arguments, *knobs, current_stream=current_stream)


def _shapes_of(arguments: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    x, residual = arguments["input"], arguments["residual"]
    mode = ResidualMode.of(residual, arguments["residual_bias"], residual)
    geometry = geometry_of_call(x, arguments["packed_weight"])
    history_frames = arguments["history_frames"]
    shapes = conv3d_rmsnorm_silu_pad_shapes(geometry, x.shape, mode, history_frames=history_frames)
    return {name: shapes[name] for name in shapes if name in Conv3dRmsNormSiluPad.written_names}


_FUNCTION = FunctionalOp(
    Conv3dRmsNormSiluPad,
    "conv3d_rmsnorm_silu_pad(Tensor input, Tensor packed_weight, Tensor bias, Tensor gamma, "
    "Tensor? residual=None, Tensor? residual_bias=None, int history_frames=0, "
    "int zero_leading_frames=0) -> Tensor[]",
    outputs=("padded_output", "cache_output", "residual_output"),
    shapes=_shapes_of,
    knobs=("history_frames", "zero_leading_frames"),
)
