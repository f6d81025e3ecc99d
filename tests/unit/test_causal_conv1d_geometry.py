# SPDX-License-Identifier: Apache-2.0
"""CausalConv1dGeometry: strict types, frozen, values judged by validate()."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_blocks import CausalConv1dGeometry, ContractError


def test_defaults_are_the_qwen3_next_short_convolution():
    geometry = CausalConv1dGeometry(8192)
    assert (geometry.channels, geometry.width, geometry.state_len) == (8192, 4, 4)
    geometry.validate()


@given(st.integers(1, 2**20), st.integers(1, 64), st.integers(1, 64))
def test_valid_exactly_where_the_state_holds_the_filter(channels, width, state_len):
    geometry = CausalConv1dGeometry(channels, width, state_len)
    if state_len >= width - 1:
        geometry.validate()
    else:
        with pytest.raises(ContractError, match=f"at least width - 1 = {width - 1}, got"):
            geometry.validate()


@pytest.mark.parametrize("name", ["channels", "width", "state_len"])
@pytest.mark.parametrize("size", [0, -1])
def test_sizes_are_positive(name, size):
    sizes = {"channels": 8, "width": 4, "state_len": 4, name: size}
    with pytest.raises(ContractError, match=f"^{name}: expected a positive size, got {size}$"):
        CausalConv1dGeometry(**sizes).validate()


@pytest.mark.parametrize("value", ["8", 8.0, None, True])
def test_wrong_python_types_raise_type_error_at_construction(value):
    with pytest.raises(TypeError, match=r"CausalConv1dGeometry\.channels"):
        CausalConv1dGeometry(value)


def test_unknown_arguments_raise_type_error():
    with pytest.raises(TypeError, match="dilation"):
        CausalConv1dGeometry(8, dilation=2)


def test_missing_arguments_raise_type_error():
    with pytest.raises(TypeError, match="channels"):
        CausalConv1dGeometry()


def test_frozen_hashable_and_comparable():
    geometry = CausalConv1dGeometry(8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.channels = 9
    assert geometry == CausalConv1dGeometry(8, 4, 4)
    assert len({geometry, CausalConv1dGeometry(8), CausalConv1dGeometry(9)}) == 2
