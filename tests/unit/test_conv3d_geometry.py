# SPDX-License-Identifier: Apache-2.0
"""Geometry and operand shapes of the Conv3D family: every extent and every refusal."""

from __future__ import annotations

import dataclasses
import re

import pytest

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.conv3d import (
    CausalConv3dGeometry,
    Conv3dGeometry,
    RmsNormSiluGeometry,
    cache_frames,
    check_history_frames,
    check_zero_leading_frames,
    history_frames_of,
    packed_channels,
)
from cudnn_blocks.geometry.conv3d_shapes import (
    ResidualMode,
    causal_conv3d_with_cache_shapes,
    check_shapes,
    conv3d_bias_residual_pad_shapes,
    conv3d_raw_shapes,
    conv3d_rmsnorm_silu_pad_shapes,
    conv3d_rmsnorm_silu_shapes,
    rmsnorm_silu_pad_shapes,
)

CONV = Conv3dGeometry(in_channels=160, out_channels=320)
NORM = RmsNormSiluGeometry(channels=640)
CAUSAL = CausalConv3dGeometry()
GIVEN = object()


def test_extents_of_the_valid_convolution():
    x = (2, 6, 98, 100, 160)
    assert CONV.packed_weight_shape == (320, 3, 3, 3, 192)
    assert CONV.output_shape(x) == (2, 4, 96, 98, 320)
    assert CONV.padded_output_shape(x) == (2, 6, 98, 100, 320)
    assert CONV.spatial_padded_output_shape(x) == (2, 4, 97, 99, 320)
    assert CONV.cache_output_shape(x) == (2, 2, 96, 98, 320)


def test_extents_of_norm_and_causal():
    assert NORM.padded_output_shape((1, 1, 4, 5, 640)) == (1, 3, 6, 7, 640)
    assert NORM.cache_output_shape((1, 1, 4, 5, 640), 0) == (1, 1, 4, 5, 640)
    assert NORM.cache_output_shape((1, 1, 4, 5, 640), 1) == (1, 2, 4, 5, 640)
    assert CAUSAL.packed_weight_shape == (160, 448)
    assert CAUSAL.padded_input_shape((2, 12, 4, 6, 7)) == (2, 6, 8, 9, 16)
    assert CAUSAL.output_shape((2, 12, 4, 6, 7)) == (2, 4, 6, 7, 160)
    assert CAUSAL.cache_output_shape((2, 12, 1, 6, 7)) == (2, 1, 6, 7, 12)
    assert CAUSAL.cache_output_shape((2, 12, 1, 6, 7), 2) == (2, 2, 6, 7, 12)


@pytest.mark.parametrize(
    ("frames", "history", "kept"),
    [(1, 0, 1), (1, 1, 2), (1, 2, 2), (2, 0, 2), (4, 0, 2), (4, 2, 2)],
)
def test_cache_keeps_at_most_two_frames(frames, history, kept):
    assert cache_frames(frames, history) == kept


@pytest.mark.parametrize(
    ("channels", "packed"), [(1, 64), (64, 64), (65, 128), (160, 192), (320, 320)]
)
def test_packed_rows_are_multiples_of_64(channels, packed):
    assert packed_channels(channels) == packed


def test_geometry_is_frozen_strict_and_read_from_shapes():
    assert Conv3dGeometry.from_shapes((1, 3, 3, 3, 160), (320, 3, 3, 3, 192)) == CONV
    assert RmsNormSiluGeometry.from_shapes((1, 1, 1, 1, 640)) == NORM
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONV.in_channels = 8
    with pytest.raises(TypeError, match=r"Conv3dGeometry\.in_channels: .*got str"):
        Conv3dGeometry(in_channels="160", out_channels=160)
    with pytest.raises(TypeError, match=r"CausalConv3dGeometry\.out_channels: .*got float"):
        CausalConv3dGeometry(out_channels=160.0)


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (
            Conv3dGeometry(in_channels=0, out_channels=8),
            "in_channels: expected a positive size, got 0",
        ),
        (
            Conv3dGeometry(in_channels=8, out_channels=-8),
            "out_channels: expected a positive size, got -8",
        ),
        (
            Conv3dGeometry(in_channels=8, out_channels=8, kernel=(1, 3, 3)),
            "kernel: expected (3, 3, 3), got (1, 3, 3)",
        ),
        (RmsNormSiluGeometry(channels=0), "channels: expected a positive size, got 0"),
        (CausalConv3dGeometry(in_channels=16), "in_channels: expected 12 (the causal convolution"),
        (
            CausalConv3dGeometry(out_channels=96),
            "out_channels: expected 160 (the causal convolution",
        ),
    ],
)
def test_validate_refuses(geometry, message):
    with pytest.raises(ContractError, match=re.escape(message)):
        geometry.validate()


@pytest.mark.parametrize(
    "geometry", [CONV, NORM, CAUSAL, Conv3dGeometry(in_channels=3, out_channels=5)]
)
def test_validate_accepts(geometry):
    geometry.validate()


@pytest.mark.parametrize(
    ("input_shape", "weight_shape", "message"),
    [
        (
            (3, 3, 3, 8),
            (8, 3, 3, 3, 64),
            "input: expected shape [N, T, H, W, Ci], got (3, 3, 3, 8)",
        ),
        (
            (1, 3, 3, 3, 8),
            (8, 448),
            "packed_weight: expected shape [Co, 3, 3, 3, ceil64(Ci)], got (8, 448)",
        ),
        (
            (1, 3, 3, 3, 8),
            (8, 8, 3, 3, 3),
            "packed_weight: expected shape (8, 3, 3, 3, 64) as made by pack",
        ),
        ((1, 3, 3, 3, 8), (8, 1, 3, 3, 64), "packed_weight: expected shape (8, 3, 3, 3, 64)"),
        ((1, 3, 3, 3, 65), (8, 3, 3, 3, 64), "packed_weight: expected shape (8, 3, 3, 3, 128)"),
        ((1, 3, 3, 3, 0), (8, 3, 3, 3, 64), "in_channels: expected a positive size, got 0"),
        ((1, 3, 3, 3, 8), (0, 3, 3, 3, 64), "out_channels: expected a positive size, got 0"),
    ],
)
def test_from_shapes_refuses(input_shape, weight_shape, message):
    with pytest.raises(ContractError, match=re.escape(message)):
        Conv3dGeometry.from_shapes(input_shape, weight_shape)


def test_norm_from_shapes_refuses():
    with pytest.raises(
        ContractError, match=re.escape("input: expected shape [N, T, H, W, C], got (4, 8)")
    ):
        RmsNormSiluGeometry.from_shapes((4, 8))
    with pytest.raises(ContractError, match="channels: expected a positive size, got 0"):
        RmsNormSiluGeometry.from_shapes((1, 1, 1, 1, 0))


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_valid_convolution_needs_three_planes_rows_and_columns(axis):
    shape = [1, 3, 3, 3, 160]
    CONV.validate_input(shape)
    shape[axis] = 2
    with pytest.raises(ContractError, match=r"input: expected .* 160\] with T, H, W >= 3, got \("):
        CONV.validate_input(shape)


@pytest.mark.parametrize("axis", [1, 2, 3])
def test_norm_and_causal_need_one_plane_row_and_column(axis):
    shape = [1, 1, 1, 1, 640]
    NORM.validate_input(shape)
    shape[axis] = 0
    with pytest.raises(ContractError, match="with T, H, W >= 1"):
        NORM.validate_input(shape)
    with pytest.raises(
        ContractError, match=r"input: expected shape \[N, 12, T, H, W\] with T, H, W >= 1"
    ):
        CAUSAL.validate_input((1, 12, *shape[1:4]))


def test_input_channels_and_rank_are_checked_and_an_empty_batch_is_not_an_error():
    for geometry, wrong in (
        (CONV, (1, 3, 3, 3, 161)),
        (NORM, (1, 1, 1, 640)),
        (CAUSAL, (1, 1, 4, 4, 12)),
    ):
        with pytest.raises(ContractError, match="input: expected shape"):
            geometry.validate_input(wrong)
    CONV.validate_input((0, 3, 3, 3, 160))
    NORM.validate_input((0, 1, 1, 1, 640))
    CAUSAL.validate_input((0, 12, 1, 1, 1))


@pytest.mark.parametrize(
    ("check", "name"),
    [(check_history_frames, "history_frames"), (check_zero_leading_frames, "zero_leading_frames")],
)
def test_frame_knobs(check, name):
    for value in (0, 1, 2):
        check(value)
    for value in (-1, 3):
        with pytest.raises(ContractError, match=f"{name}: expected 0 to 2, got {value}"):
            check(value)
    for value, kind in ((1.0, "float"), (True, "bool"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"{name}: expected an int, got {kind}"):
            check(value)


def test_history_frames_are_read_from_previous():
    assert history_frames_of(None) == 0
    assert history_frames_of((1, 2, 4, 4, 12)) == 2
    for shape in ((1, 0, 4, 4, 12), (1, 3, 4, 4, 12), (1, 4, 4, 12)):
        with pytest.raises(ContractError, match=r"previous: expected shape \[N, 1 or 2, H, W, C\]"):
            history_frames_of(shape)


def test_residual_modes():
    assert ResidualMode.of(None, None, None) is ResidualMode.NONE
    assert ResidualMode.of(None, None, GIVEN) is ResidualMode.SAVE_INPUT
    assert ResidualMode.of(GIVEN, None, GIVEN) is ResidualMode.ADD
    assert ResidualMode.of(GIVEN, GIVEN, GIVEN) is ResidualMode.ADD_BIASED
    with pytest.raises(ContractError, match="residual_bias: expected None without a residual"):
        ResidualMode.of(None, GIVEN, GIVEN)
    with pytest.raises(
        ContractError, match="residual_output: expected a tensor where a residual is given"
    ):
        ResidualMode.of(GIVEN, None, None)


def test_operand_orders():
    x = (1, 4, 5, 6, 160)
    conv = ["input", "packed_weight"]
    residual = ["residual", "residual_bias", "residual_output"]
    mode = ResidualMode.ADD_BIASED
    assert list(conv3d_raw_shapes(CONV, x)) == [*conv, "output"]
    assert list(conv3d_rmsnorm_silu_shapes(CONV, x, mode)) == [
        *conv,
        "bias",
        "gamma",
        "output",
        *residual,
    ]
    assert list(conv3d_rmsnorm_silu_pad_shapes(CONV, x, mode, history_frames=1)) == [
        *conv, "bias", "gamma", "padded_output", "cache_output", *residual,
    ]  # fmt: skip
    assert list(conv3d_bias_residual_pad_shapes(CONV, x, has_residual_bias=True)) == [
        *conv, "bias", "residual", "padded_output", "residual_bias",
    ]  # fmt: skip
    y = (1, 2, 5, 6, 640)
    full = rmsnorm_silu_pad_shapes(
        NORM, y, mode, has_input_bias=True, previous_shape=(1, 1, 5, 6, 640)
    )
    assert list(full) == [
        "input", "gamma", "padded_output", "cache_output", "input_bias", "previous", *residual,
    ]  # fmt: skip
    chunk = causal_conv3d_with_cache_shapes(
        CAUSAL, (1, 12, 2, 5, 6), previous_shape=(1, 2, 5, 6, 12)
    )
    assert list(chunk) == [
        "input", "packed_weight", "padded_input", "cache_output", "output", "previous",
    ]  # fmt: skip


def test_operands_that_are_not_given_are_left_out():
    assert "padded_input" not in causal_conv3d_with_cache_shapes(
        CAUSAL, (1, 12, 2, 5, 6), has_padded_input=False
    )
    bare = rmsnorm_silu_pad_shapes(NORM, (1, 2, 5, 6, 640))
    assert list(bare) == ["input", "gamma", "padded_output", "cache_output"]
    assert ResidualMode.ADD.shapes((1, 2, 3, 4, 8)) == {
        "residual": (1, 2, 3, 4, 8),
        "residual_output": (1, 2, 3, 4, 8),
    }


def test_fused_convolutions_refuse_a_residual_output_without_a_residual():
    for shapes in (conv3d_rmsnorm_silu_shapes, conv3d_rmsnorm_silu_pad_shapes):
        with pytest.raises(
            ContractError, match="residual_output: expected None without a residual"
        ):
            shapes(CONV, (1, 4, 5, 6, 160), ResidualMode.SAVE_INPUT)
    with pytest.raises(ContractError, match="history_frames: expected 0 to 2, got 3"):
        conv3d_rmsnorm_silu_pad_shapes(CONV, (1, 4, 5, 6, 160), history_frames=3)


def test_check_shapes_names_the_operand():
    expected = {"input": (1, 2), "output": (3, 4)}
    check_shapes(expected, {"input": [1, 2], "output": (3, 4), "residual": None})
    with pytest.raises(ContractError, match=re.escape("output: expected shape (3, 4), got (3, 5)")):
        check_shapes(expected, {"input": (1, 2), "output": (3, 5)})
    with pytest.raises(ContractError, match=re.escape("output: expected shape (3, 4), got None")):
        check_shapes(expected, {"input": (1, 2), "output": None})
    with pytest.raises(ContractError, match=re.escape("residual: expected None, got shape (3, 4)")):
        check_shapes(expected, {"input": (1, 2), "output": (3, 4), "residual": (3, 4)})
