# SPDX-License-Identifier: Apache-2.0
"""RmsNormSiluPad and ``ops.rmsnorm_silu_pad``: the post-operations on an existing tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cudnn_blocks.api_base import Sample
from cudnn_blocks.geometry.conv3d import RmsNormSiluGeometry, history_frames_of
from cudnn_blocks.geometry.conv3d_shapes import ResidualMode, rmsnorm_silu_pad_shapes
from cudnn_blocks.operands import Shape
from cudnn_blocks.ops.conv3d_family import Conv3dFamilyOp
from cudnn_blocks.ops.functional import FunctionalOp
from cudnn_blocks.stages.norm.stage import RmsNormSiluPadModes, RmsNormSiluPadStage
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target


class RmsNormSiluPad(Conv3dFamilyOp):
    """Bias, residual, L2 normalisation and SiLU of a tensor, into a padded one and a cache.

    With ``B`` the rounding to BF16 and everything between two of them in FP32::

        value     = B(B(input + input_bias) + B(residual + residual_bias))    of what is given
        x         = B(value / max(sqrt(sum over c of value**2), 1e-12))
        x         = B(B(x * sqrt(C)) * gamma)
        activated = B(x / (1 + exp(-x))),  residual_output = value

    ``padded_output`` holds, in frame order, ``2 - P`` zero planes, the ``P`` frames of ``previous``
    and ``activated``, each with a zero border; ``cache_output`` holds the last ``min(2, T + P)``
    frames of ``previous`` and ``activated``. History is activated already and moves bit for bit.

    Every operand is BF16, contiguous and 16-byte aligned. N, T, H and W are dynamic: a plan takes
    them up to its samples' extents, and N = 0 is an empty result.

    Args:
        sample_input: ``[N, T, H, W, C]`` with T, H, W >= 1.
        sample_gamma: ``[C]``.
        sample_padded_output: ``[N, T+2, H+2, W+2, C]``.
        sample_cache_output: ``[N, min(2, T+P), H, W, C]``.
        sample_input_bias: ``[C]``, or None for no bias addition.
        sample_previous: ``[N, P, H, W, C]``, P = 1 or 2, or None for P = 0.
        sample_residual: shape of the input, or None.
        sample_residual_bias: ``[C]``, or None; needs a residual.
        sample_residual_output: shape of the input; needed with a residual, allowed without.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``rmsnorm_silu_pad``.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: padded_output, cache_output, residual_output.

    Raises:
        ContractError: a tensor breaks the contract, or written memory overlaps another operand.
        NotServedError: channels or a size without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = RmsNormSiluPad(x, gamma, padded, cache, sample_previous=history)
        >>> plan.compile()
        >>> plan.execute(x, gamma, padded, cache, previous=history)

    Source: behaviour after the Conv3D family of cudnn-frontend; no code taken.
    """

    op_name = "rmsnorm-silu-pad"
    operand_names = (
        "input",
        "gamma",
        "padded_output",
        "cache_output",
        "input_bias",
        "previous",
        "residual",
        "residual_bias",
        "residual_output",
    )
    required_names = frozenset(operand_names[:4])
    written_names = frozenset({"padded_output", "cache_output", "residual_output"})

    def __init__(
        self,
        sample_input: Sample,
        sample_gamma: Sample,
        sample_padded_output: Sample,
        sample_cache_output: Sample,
        sample_input_bias: Sample | None = None,
        sample_previous: Sample | None = None,
        sample_residual: Sample | None = None,
        sample_residual_bias: Sample | None = None,
        sample_residual_output: Sample | None = None,
        *,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        samples = {
            "input": sample_input,
            "gamma": sample_gamma,
            "padded_output": sample_padded_output,
            "cache_output": sample_cache_output,
            "input_bias": sample_input_bias,
            "previous": sample_previous,
            "residual": sample_residual,
            "residual_bias": sample_residual_bias,
            "residual_output": sample_residual_output,
        }
        super().__init__(samples, None, target=target, engines=engines)

    def execute(
        self,
        input: torch.Tensor,
        gamma: torch.Tensor,
        padded_output: torch.Tensor,
        cache_output: torch.Tensor,
        input_bias: torch.Tensor | None = None,
        previous: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        residual_bias: torch.Tensor | None = None,
        residual_output: torch.Tensor | None = None,
        current_stream: StreamLike | None = None,
    ) -> None:
        """One pass; see the class for every operand."""
        self._launch(
            (
                input,
                gamma,
                padded_output,
                cache_output,
                input_bias,
                previous,
                residual,
                residual_bias,
                residual_output,
            ),
            current_stream,
        )

    def _read_geometry(self) -> RmsNormSiluGeometry:
        return RmsNormSiluGeometry.from_shapes(self._specs["input"].shape)

    def _input_shape(self) -> Shape:
        return ("N", "T", "H", "W", self.geometry.channels)

    def _previous_shape(self) -> Sequence[int] | None:
        previous = self._specs.get("previous")
        return None if previous is None else previous.shape

    def _shapes(self, input_shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        return rmsnorm_silu_pad_shapes(
            self.geometry,
            input_shape,
            self._residual_mode(),
            has_input_bias="input_bias" in self._specs,
            previous_shape=self._previous_shape(),
        )

    def _build_stages(
        self, target: Target, engines: Mapping[str, str]
    ) -> tuple[RmsNormSiluPadStage, ...]:
        specs = self._specs
        modes = RmsNormSiluPadModes(
            has_input_bias="input_bias" in specs,
            has_previous="previous" in specs,
            has_residual="residual" in specs,
            has_residual_bias="residual_bias" in specs,
            has_residual_output="residual_output" in specs,
            history_frames=history_frames_of(self._previous_shape()),
        )
        shape = specs["padded_output"].shape
        engine = engines.get(RmsNormSiluPadStage.name)
        return (RmsNormSiluPadStage(self.geometry, modes, shape, target, engine),)


def rmsnorm_silu_pad(
    input: torch.Tensor,
    gamma: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    previous: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    residual_bias: torch.Tensor | None = None,
    current_stream: StreamLike | None = None,
    *,
    save_input: bool = False,
) -> dict[str, torch.Tensor | None]:
    """Bias, residual, norm and SiLU into a padded tensor; as :class:`RmsNormSiluPad` has it.

    Args:
        input: ``[N, T, H, W, C]``.
        gamma: ``[C]``.
        input_bias: ``[C]`` or None.
        previous: ``[N, P, H, W, C]``, the ``cache_output`` of the chunk before, or None.
        residual: shape of the input, or None.
        residual_bias: ``[C]`` or None; needs a residual.
        current_stream: stream to launch on; None for torch's current stream of the input's device.
        save_input: keep the value before normalisation even without a residual.

    Returns:
        ``padded_output``, ``cache_output`` and, with a residual or ``save_input``,
        ``residual_output``, else None. New tensors, allocated on the stream of the launch.
    """
    arguments = (input, gamma, input_bias, previous, residual, residual_bias, save_input)
    return _FUNCTION(*arguments, current_stream=current_stream)


def _shapes_of(arguments: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    x, previous, residual = arguments["input"], arguments["previous"], arguments["residual"]
    saved = x if arguments["save_input"] else residual
    geometry = RmsNormSiluGeometry.from_shapes((*x.shape[:-1], *map(int, x.shape[-1:])))
    shapes = rmsnorm_silu_pad_shapes(
        geometry,
        x.shape,
        ResidualMode.of(residual, arguments["residual_bias"], saved),
        previous_shape=None if previous is None else previous.shape,
    )
    return {name: shapes[name] for name in shapes if name in RmsNormSiluPad.written_names}


_FUNCTION = FunctionalOp(
    RmsNormSiluPad,
    "rmsnorm_silu_pad(Tensor input, Tensor gamma, Tensor? input_bias=None, "
    "Tensor? previous=None, Tensor? residual=None, Tensor? residual_bias=None, "
    "bool save_input=False) -> Tensor[]",
    outputs=("padded_output", "cache_output", "residual_output"),
    shapes=_shapes_of,
)
