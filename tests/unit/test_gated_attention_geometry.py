# SPDX-License-Identifier: Apache-2.0
"""GatedAttentionGeometry: every bound from both sides, and the column bands of the projection."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_blocks import ContractError, GatedAttentionGeometry
from cudnn_blocks.geometry import ProjBlock

QWEN3_NEXT = {"d_model": 2048, "h_q": 16, "h_kv": 2, "d_head": 256, "rope_dim": 64}


def geometry(**changes) -> GatedAttentionGeometry:
    return GatedAttentionGeometry(**{**QWEN3_NEXT, **changes})


def test_fields_are_append_only():
    names = [field.name for field in dataclasses.fields(GatedAttentionGeometry)]
    assert names == [
        "d_model",
        "h_q",
        "h_kv",
        "d_head",
        "rope_dim",
        "qk_norm_eps",
        "attn_scale",
        "is_causal",
        "causal_bottom_right",
        "window_left",
        "window_right",
        "qk_norm",
    ]


def test_defaults():
    one = geometry()
    one.validate()
    assert (one.qk_norm_eps, one.scale, one.is_causal, one.qk_norm) == (1e-6, 0.0625, True, True)
    assert (one.causal_bottom_right, one.window_left, one.window_right) == (False, -1, -1)
    assert geometry(attn_scale=0.25).scale == 0.25


def test_column_bands_of_the_large_model():
    """The layout that weights are packed for: offsets never move."""
    one = GatedAttentionGeometry(4096, 32, 2, 256, 64)
    assert one.n_qkvg == 17408
    assert one.qkvg_offsets == (0, 8192, 16384, 16896)
    assert one.qkvg_block_widths == (8192, 8192, 512, 512)
    assert one.qkvg_heads == (32, 32, 2, 2)
    assert (one.gqa_ratio, one.attn_width) == (16, 8192)
    assert [band.name for band in ProjBlock] == ["Q", "GATE", "K", "V"]
    assert [int(band) for band in ProjBlock] == [0, 1, 2, 3]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_bands_follow_one_another_without_a_gap(ratio, h_kv, sixteenths):
    one = GatedAttentionGeometry(64, ratio * h_kv, h_kv, 64 * sixteenths, 0)
    one.validate()
    end = 0
    for band, offset, width in zip(ProjBlock, one.qkvg_offsets, one.qkvg_block_widths, strict=True):
        assert offset == end
        end += width
        assert one.block_for_column(offset) is band
        assert one.block_for_column(end - 1) is band
    assert end == one.n_qkvg
    for outside in (-1, end):
        with pytest.raises(ContractError, match="^column: expected 0 to"):
            one.block_for_column(outside)


@pytest.mark.parametrize("name", ["d_model", "h_q", "h_kv", "d_head"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_are_positive(name, size):
    with pytest.raises(ContractError, match=f"^{name}: expected a positive size, got {size}$"):
        geometry(**{name: size}).validate()


@pytest.mark.parametrize(("h_q", "h_kv"), [(3, 2), (33, 2), (2, 4), (0, 1)])
def test_heads_that_do_not_divide(h_q, h_kv):
    with pytest.raises(ContractError, match="^h_q: expected"):
        geometry(h_q=h_q, h_kv=h_kv).validate()


@pytest.mark.parametrize(("h_q", "h_kv"), [(6, 2), (6, 1), (14, 2), (5, 5)])
def test_any_whole_ratio_is_inside_the_contract(h_q, h_kv):
    geometry(h_q=h_q, h_kv=h_kv).validate()


@pytest.mark.parametrize(
    ("changes", "is_good"),
    [
        ({"h_q": 2, "h_kv": 2, "d_head": 32, "rope_dim": 32}, True),
        ({"h_q": 4, "h_kv": 1, "d_head": 32, "rope_dim": 32}, False),
        ({"h_q": 8, "h_kv": 8, "d_head": 8, "rope_dim": 8}, True),
        ({"h_q": 4, "h_kv": 4, "d_head": 24, "rope_dim": 8}, False),
    ],
)
def test_bands_are_multiples_of_64_columns(changes, is_good):
    if is_good:
        geometry(**changes).validate()
    else:
        with pytest.raises(ContractError, match="^d_head: expected h_(q|kv) . d_head a multiple"):
            geometry(**changes).validate()


@pytest.mark.parametrize("rope_dim", [0, 2, 64, 254, 256])
def test_rope_dims_inside(rope_dim):
    geometry(rope_dim=rope_dim).validate()


@pytest.mark.parametrize("rope_dim", [-2, 1, 63, 255, 258])
def test_rope_dims_outside(rope_dim):
    with pytest.raises(ContractError, match="^rope_dim: expected an even number from 0 to d_head"):
        geometry(rope_dim=rope_dim).validate()


def test_without_norm_something_has_to_rotate():
    geometry(qk_norm=False, rope_dim=2).validate()
    with pytest.raises(ContractError, match="^rope_dim: expected at least 2 where qk_norm is Fal"):
        geometry(qk_norm=False, rope_dim=0).validate()


@pytest.mark.parametrize("value", [0.0, -1e-6, math.inf, math.nan])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_eps_is_positive_also_where_it_is_not_used(value, qk_norm):
    with pytest.raises(ContractError, match="^qk_norm_eps: expected a positive number"):
        geometry(qk_norm_eps=value, qk_norm=qk_norm).validate()


@pytest.mark.parametrize("value", [0.0, -0.5, math.inf, math.nan])
def test_scale_is_positive(value):
    with pytest.raises(ContractError, match="^attn_scale: expected a positive number, or None"):
        geometry(attn_scale=value).validate()


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, None),
        ({"window_left": 0}, None),
        ({"window_left": 0, "window_right": 0}, None),
        ({"is_causal": False, "window_left": 128}, None),
        ({"causal_bottom_right": True, "window_left": 3, "window_right": 2}, None),
        ({"window_left": -2}, "window_left"),
        ({"window_right": -2}, "window_right"),
        ({"is_causal": False, "causal_bottom_right": True}, "causal_bottom_right"),
        ({"is_causal": False, "window_right": 0}, "window_right"),
    ],
)
def test_masks(changes, refused):
    if refused is None:
        geometry(**changes).validate()
    else:
        with pytest.raises(ContractError, match=f"^{refused}: expected"):
            geometry(**changes).validate()


@pytest.mark.parametrize("shape", [(2, 8), (2, 8, 2047), (1, 2, 8, 2048)])
def test_hidden_states_of_another_shape(shape):
    with pytest.raises(ContractError, match=r"^h: expected shape \[B, S, 2048\]"):
        geometry().validate_hidden(shape)
    geometry().validate_hidden((2, 8, 2048))


@pytest.mark.parametrize(
    "changes",
    [{"d_head": 256.0}, {"h_q": "16"}, {"is_causal": 1}, {"attn_scale": "x"}, {"rope_dim": None}],
)
def test_wrong_python_types_raise_type_error_at_construction(changes):
    (name,) = changes
    with pytest.raises(TypeError, match=rf"GatedAttentionGeometry\.{name}"):
        geometry(**changes)


def test_frozen_hashable_and_comparable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry().h_q = 9
    assert geometry() == geometry()
    assert len({geometry(), geometry(window_left=1), geometry(window_right=1)}) == 3
