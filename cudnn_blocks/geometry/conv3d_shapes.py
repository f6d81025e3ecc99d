# SPDX-License-Identifier: Apache-2.0
"""The exact shape of every operand of the Conv3D family, one function per op.

Each function checks the input's shape and returns the shapes of that call by name, in the order of
``execute``. Operands that are not given are left out; which optional ones may stand together is
:class:`ResidualMode`.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.conv3d import check_history_frames, history_frames_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cudnn_blocks.geometry.conv3d import (
        CausalConv3dGeometry,
        Conv3dGeometry,
        RmsNormSiluGeometry,
        Shape,
    )

    Shapes = dict[str, Shape]


class ResidualMode(Enum):
    """The legal combinations of ``residual``, ``residual_bias`` and ``residual_output``."""

    NONE = "none"
    """No residual; the pre-normalisation value is not kept."""
    SAVE_INPUT = "save_input"
    """No residual, but ``residual_output`` keeps the pre-normalisation value."""
    ADD = "add"
    """``residual`` is added and the sum kept in ``residual_output``."""
    ADD_BIASED = "add_biased"
    """As ADD, with ``residual_bias`` added to the residual first."""

    @classmethod
    def of(
        cls, residual: object | None, residual_bias: object | None, residual_output: object | None
    ) -> ResidualMode:
        """Returns the mode that a call with these operands asks for.

        Raises:
            ContractError: a bias without a residual, or a residual without a place for the sum.
        """
        if residual is None:
            if residual_bias is not None:
                raise ContractError("residual_bias", "None without a residual", "a tensor")
            return cls.NONE if residual_output is None else cls.SAVE_INPUT
        if residual_output is None:
            raise ContractError("residual_output", "a tensor where a residual is given", None)
        return cls.ADD if residual_bias is None else cls.ADD_BIASED

    @property
    def has_residual(self) -> bool:
        """True where a residual is added."""
        return self in (ResidualMode.ADD, ResidualMode.ADD_BIASED)

    @property
    def has_residual_output(self) -> bool:
        """True where the pre-normalisation value is written."""
        return self is not ResidualMode.NONE

    def shapes(self, activation_shape: Shape) -> Shapes:
        """Shapes of the operands of this mode, in the order of ``execute``."""
        shapes: Shapes = {}
        if self.has_residual:
            shapes["residual"] = activation_shape
        if self is ResidualMode.ADD_BIASED:
            shapes["residual_bias"] = activation_shape[-1:]
        if self.has_residual_output:
            shapes["residual_output"] = activation_shape
        return shapes


def conv3d_raw_shapes(geometry: Conv3dGeometry, input_shape: Sequence[int]) -> Shapes:
    """``input, packed_weight, output``."""
    return {**_conv_shapes(geometry, input_shape), "output": geometry.output_shape(input_shape)}


def conv3d_rmsnorm_silu_shapes(
    geometry: Conv3dGeometry,
    input_shape: Sequence[int],
    residual_mode: ResidualMode = ResidualMode.NONE,
) -> Shapes:
    """``input, packed_weight, bias, gamma, output, residual, residual_bias, residual_output``."""
    _refuse_save_input(residual_mode)
    return {
        **_conv_shapes(geometry, input_shape),
        "bias": (geometry.out_channels,),
        "gamma": (geometry.out_channels,),
        "output": geometry.output_shape(input_shape),
        **residual_mode.shapes(geometry.output_shape(input_shape)),
    }


def conv3d_rmsnorm_silu_pad_shapes(
    geometry: Conv3dGeometry,
    input_shape: Sequence[int],
    residual_mode: ResidualMode = ResidualMode.NONE,
    *,
    history_frames: int = 0,
) -> Shapes:
    """``input, packed_weight, bias, gamma, padded_output, cache_output``, then the residual's.

    Those are ``residual, residual_bias, residual_output``.
    """
    check_history_frames(history_frames)
    _refuse_save_input(residual_mode)
    return {
        **_conv_shapes(geometry, input_shape),
        "bias": (geometry.out_channels,),
        "gamma": (geometry.out_channels,),
        "padded_output": geometry.padded_output_shape(input_shape),
        "cache_output": geometry.cache_output_shape(input_shape, history_frames),
        **residual_mode.shapes(geometry.output_shape(input_shape)),
    }


def conv3d_bias_residual_pad_shapes(
    geometry: Conv3dGeometry, input_shape: Sequence[int], *, has_residual_bias: bool = False
) -> Shapes:
    """``input, packed_weight, bias, residual, padded_output, residual_bias``."""
    shapes = {
        **_conv_shapes(geometry, input_shape),
        "bias": (geometry.out_channels,),
        "residual": geometry.output_shape(input_shape),
        "padded_output": geometry.spatial_padded_output_shape(input_shape),
    }
    if has_residual_bias:
        shapes["residual_bias"] = (geometry.out_channels,)
    return shapes


def rmsnorm_silu_pad_shapes(
    geometry: RmsNormSiluGeometry,
    input_shape: Sequence[int],
    residual_mode: ResidualMode = ResidualMode.NONE,
    *,
    has_input_bias: bool = False,
    previous_shape: Sequence[int] | None = None,
) -> Shapes:
    """``input, gamma, padded_output, cache_output, input_bias, previous``, then the residual's.

    Those are ``residual, residual_bias, residual_output``.
    """
    geometry.validate_input(input_shape)
    history_frames = history_frames_of(previous_shape)
    shapes: Shapes = {
        "input": tuple(input_shape),
        "gamma": (geometry.channels,),
        "padded_output": geometry.padded_output_shape(input_shape),
        "cache_output": geometry.cache_output_shape(input_shape, history_frames),
    }
    if has_input_bias:
        shapes["input_bias"] = (geometry.channels,)
    if history_frames:
        shapes["previous"] = geometry.previous_shape(input_shape, history_frames)
    return {**shapes, **residual_mode.shapes(tuple(input_shape))}


def causal_conv3d_with_cache_shapes(
    geometry: CausalConv3dGeometry,
    input_shape: Sequence[int],
    *,
    has_padded_input: bool = True,
    previous_shape: Sequence[int] | None = None,
) -> Shapes:
    """``input, packed_weight, padded_input, cache_output, output, previous``."""
    geometry.validate_input(input_shape)
    history_frames = history_frames_of(previous_shape)
    shapes: Shapes = {
        "input": tuple(input_shape),
        "packed_weight": geometry.packed_weight_shape,
    }
    if has_padded_input:
        shapes["padded_input"] = geometry.padded_input_shape(input_shape)
    shapes["cache_output"] = geometry.cache_output_shape(input_shape, history_frames)
    shapes["output"] = geometry.output_shape(input_shape)
    if history_frames:
        shapes["previous"] = geometry.previous_shape(input_shape, history_frames)
    return shapes


def check_shapes(expected: Shapes, actual: Mapping[str, Sequence[int] | None]) -> None:
    """Raises ContractError at the first operand that is missing, undeclared or of another shape.

    Args:
        expected: the result of one of the functions above.
        actual: shape of every operand of the op, None where it is not given.
    """
    for name, shape in expected.items():
        got = actual.get(name)
        if got is None or tuple(got) != shape:
            raise ContractError(name, f"shape {shape}", None if got is None else tuple(got))
    for name, got in actual.items():
        if got is not None and name not in expected:
            raise ContractError(name, "None", f"shape {tuple(got)}")


def _conv_shapes(geometry: Conv3dGeometry, input_shape: Sequence[int]) -> Shapes:
    geometry.validate_input(input_shape)
    return {"input": tuple(input_shape), "packed_weight": geometry.packed_weight_shape}


def _refuse_save_input(residual_mode: ResidualMode) -> None:
    if residual_mode is ResidualMode.SAVE_INPUT:
        raise ContractError("residual_output", "None without a residual", "a tensor")
