# SPDX-License-Identifier: Apache-2.0
"""CausalConv3dWithCache and ``ops.causal_conv3d_with_cache``: the streaming first layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cudnn_blocks.api_base import Sample
from cudnn_blocks.geometry.conv3d import CausalConv3dGeometry, history_frames_of
from cudnn_blocks.geometry.conv3d_shapes import causal_conv3d_with_cache_shapes
from cudnn_blocks.operands import AnyStrides, Operand, Shape
from cudnn_blocks.ops.conv3d_family import DTYPE, Conv3dFamilyOp, Operands
from cudnn_blocks.ops.functional import FunctionalOp
from cudnn_blocks.stages.conv3d_input.stage import (
    PADDED_INPUT,
    CausalConv3dStage,
    CausalPackStage,
)
from cudnn_blocks.stages.stage import Stage
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target

_INPUT_ALIGNMENT_BYTES = 2
_PREVIOUS_ALIGNMENT_BYTES = 8


class CausalConv3dWithCache(Conv3dFamilyOp):
    """A causal 3x3x3 convolution 12 -> 160 over chunks of raw video, and the history it needs next.

    With ``P`` frames of ``previous`` and ``B`` the rounding to BF16::

        padded_input = 2 - P zero planes, previous, input; each with a zero border, NTHWC, 12 of 16
                       channels, the others zero
        output       = B(Conv3D(padded_input, packed_weight))
        cache_output = the last min(2, T + P) raw frames, the ``previous`` of the next chunk

    Rounding: FP32 accumulation, one rounding. A clip gives the same bits however it is cut. Planes
    that stand in for missing history are not multiplied.

    Operands are BF16. N, T, H and W are dynamic: a plan takes them up to its samples' extents, for
    which its tile is chosen; N = 0 is an empty result.

    Args:
        sample_input: ``[N, 12, T, H, W]``, T, H, W >= 1, any strides, 2-byte aligned.
        sample_packed_weight: ``[160, 448]`` of ``pack_causal_conv3d_weight``, contiguous, 16-byte
            aligned.
        sample_padded_input: ``[N, T+2, H+2, W+2, 16]``, contiguous, 16-byte aligned: scratch, all
            of which is written. None takes it from the workspace, in ``execute`` as well.
        sample_cache_output: ``[N, min(2, T+P), H, W, 12]``, contiguous, 16-byte aligned.
        sample_output: ``[N, T, H, W, 160]``, contiguous, 16-byte aligned.
        sample_previous: ``[N, P, H, W, 12]``, P = 1 or 2, contiguous, 8-byte aligned, or None for
            the beginning of a clip.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; stages are ``causal_pack`` and ``causal_conv3d``.

    Workspace: ``padded_input`` where none is given at construction, else none.
    Streams: two launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: padded_input, cache_output, output, workspace.

    Raises:
        ContractError: a tensor breaks the contract, or written memory overlaps another operand.
        NotServedError: a size without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = CausalConv3dWithCache(chunk, packed_weight, None, cache, output, history)
        >>> plan.compile()
        >>> workspace = torch.empty(plan.get_workspace_size(), dtype=torch.uint8, device="cuda")
        >>> plan.execute(
        ...     chunk, packed_weight, None, cache, output, history, workspace=workspace
        ... )

    Source: behaviour after the Conv3D family of cudnn-frontend; no code taken.
    """

    op_name = "causal-conv3d-with-cache"
    operand_names = (
        "input",
        "packed_weight",
        PADDED_INPUT,
        "cache_output",
        "output",
        "previous",
    )
    required_names = frozenset(operand_names) - {PADDED_INPUT, "previous"}
    written_names = frozenset({PADDED_INPUT, "cache_output", "output"})

    def __init__(
        self,
        sample_input: Sample,
        sample_packed_weight: Sample,
        sample_padded_input: Sample | None,
        sample_cache_output: Sample,
        sample_output: Sample,
        sample_previous: Sample | None = None,
        *,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        samples = {
            "input": sample_input,
            "packed_weight": sample_packed_weight,
            PADDED_INPUT: sample_padded_input,
            "cache_output": sample_cache_output,
            "output": sample_output,
            "previous": sample_previous,
        }
        super().__init__(samples, None, target=target, engines=engines)

    def execute(
        self,
        input: torch.Tensor,
        packed_weight: torch.Tensor,
        padded_input: torch.Tensor | None,
        cache_output: torch.Tensor,
        output: torch.Tensor,
        previous: torch.Tensor | None = None,
        current_stream: StreamLike | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """One chunk; see the class for every operand."""
        operands = (input, packed_weight, padded_input, cache_output, output, previous)
        self._launch(operands, current_stream, workspace)

    def _read_geometry(self) -> CausalConv3dGeometry:
        return CausalConv3dGeometry()

    def _input_shape(self) -> Shape:
        return ("N", self.geometry.in_channels, "T", "H", "W")

    def _operand(self, name: str) -> Operand:
        operand = super()._operand(name)
        if name == "input":
            return dataclasses.replace(
                operand, strides=AnyStrides(), alignment_bytes=_INPUT_ALIGNMENT_BYTES
            )
        if name == "previous":
            return dataclasses.replace(operand, alignment_bytes=_PREVIOUS_ALIGNMENT_BYTES)
        return operand

    def _previous_shape(self) -> Sequence[int] | None:
        previous = self._specs.get("previous")
        return None if previous is None else previous.shape

    def _shapes(self, input_shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        return causal_conv3d_with_cache_shapes(
            self.geometry,
            input_shape,
            has_padded_input=PADDED_INPUT in self._specs,
            previous_shape=self._previous_shape(),
        )

    def _build_stages(self, target: Target, engines: Mapping[str, str]) -> tuple[Stage, ...]:
        shape = self.geometry.padded_input_shape(self._specs["input"].shape)
        history_frames = history_frames_of(self._previous_shape())
        has_padded_input = PADDED_INPUT in self._specs
        pack, conv = engines.get(CausalPackStage.name), engines.get(CausalConv3dStage.name)
        return (
            CausalPackStage(shape, history_frames, has_padded_input, target, pack),
            CausalConv3dStage(shape, history_frames, target, conv),
        )

    def _stage_operands(
        self, operands: Operands, workspace: torch.Tensor | None
    ) -> Sequence[Operands]:
        if PADDED_INPUT not in self._specs:
            x, packed_weight, _, *rest = operands
            assert x is not None
            assert workspace is not None
            shape = self.geometry.padded_input_shape(x.shape)
            padded_input = self._layout.view(workspace, PADDED_INPUT, DTYPE, shape)
            operands = [x, packed_weight, padded_input, *rest]
        return [operands, operands]


def causal_conv3d_with_cache(
    input: torch.Tensor,
    packed_weight: torch.Tensor,
    previous: torch.Tensor | None = None,
    current_stream: StreamLike | None = None,
) -> dict[str, torch.Tensor | None]:
    """One chunk of a causal convolution 12 -> 160; as :class:`CausalConv3dWithCache` has it.

    Args:
        input: ``[N, 12, T, H, W]``, any strides.
        packed_weight: of ``pack_causal_conv3d_weight``.
        previous: the ``cache_output`` of the chunk before, or None for the beginning of a clip.
        current_stream: stream to launch on; None for torch's current stream of the input's device.

    Returns:
        ``output`` ``[N, T, H, W, 160]`` and ``cache_output``, new tensors, allocated on the stream
        of the launch.
    """
    return _FUNCTION(input, packed_weight, previous, current_stream=current_stream)


def _shapes_of(arguments: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    previous = arguments["previous"]
    shapes = causal_conv3d_with_cache_shapes(
        CausalConv3dGeometry(),
        arguments["input"].shape,
        previous_shape=None if previous is None else previous.shape,
    )
    return {name: shapes[name] for name in shapes if name in CausalConv3dWithCache.written_names}


_FUNCTION = FunctionalOp(
    CausalConv3dWithCache,
    "causal_conv3d_with_cache(Tensor input, Tensor packed_weight, Tensor? previous=None) "
    "-> Tensor[]",
    outputs=("output", "cache_output"),
    shapes=_shapes_of,
)
