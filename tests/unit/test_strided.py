# SPDX-License-Identifier: Apache-2.0
"""Strided views: their rule, bands that are interleaved, an operand given again as another."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cudnn_blocks import ContractError
from cudnn_blocks.operands import Operand, OperandTable
from cudnn_blocks.strided import Strided, are_interleaved, vector_strides

BF16 = torch.bfloat16
SHAPES = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple)


def places(shape, stride):
    return [
        sum(i * s for i, s in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


@given(SHAPES, st.data())
def test_a_written_tensor_keeps_its_elements_apart(shape, data):
    stride = (*data.draw(st.tuples(*(st.integers(0, 40) for _ in shape[1:]))), 1)
    accepted = Strided(1, is_written=True).accepts(shape, stride)
    used = places(shape, stride)
    if accepted:
        assert len(set(used)) == len(used)
    by_size = sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1)
    nested = all(s * n <= larger for (s, n), (larger, _) in itertools.pairwise(by_size))
    if nested and 0 not in [s for s, _ in by_size]:
        assert accepted, "every slice of a compact tensor passes"
    assert Strided(1).accepts(shape, stride)


@pytest.mark.parametrize(
    ("shape", "stride", "is_good"),
    [
        ((2, 5, 4, 64), (9000, 1800, 64, 1), True),
        ((2, 5, 4, 64), (9000, 1800, 72, 1), True),
        ((2, 5, 4, 64), (9000, 1801, 64, 1), False),
        ((2, 5, 4, 64), (9000, 1800, 64, 2), False),
        ((1, 5, 4, 64), (3, 1800, 64, 1), True),
        ((2, 1, 1, 64), (64, 5, 7, 1), True),
        ((2, 5, 4, 64), (256, 512, 64, 1), True),
        ((0, 5, 4, 64), (1, 1, 1, 9), True),
    ],
)
def test_the_rule(shape, stride, is_good):
    assert Strided(8).accepts(shape, stride) == is_good


def test_a_repeated_axis_may_be_read_but_not_written():
    shape, stride = (2, 5, 64), (0, 64, 1)
    assert Strided(8).accepts(shape, stride)
    assert not Strided(8, is_written=True).accepts(shape, stride)
    assert not Strided(8, is_written=True).accepts((2, 5, 64), (320, 56, 1))


def test_strides_of_axes_with_one_element_count_for_a_plain_launch():
    assert Strided(8).is_plain((1000, 64, 1))
    assert not Strided(8).is_plain((1001, 64, 1))
    assert not Strided(8).is_plain((1000, 64, 2))


def test_the_rule_of_vectors_leaves_other_widths_to_the_engines():
    assert vector_strides(256) == Strided(8)
    assert vector_strides(12, is_written=True) == Strided(4, is_written=True)


def test_descriptions():
    assert Strided(8).describe((1,)) == "strides (..., 1), the others multiples of 8"
    assert "that keep all elements apart" in Strided(8, is_written=True).describe((1,))


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3)),
    st.integers(1, 30),
    st.integers(0, 30),
    st.integers(0, 30),
    st.integers(1, 12),
    st.integers(1, 12),
)
def test_interleaved_tensors_share_no_element(sizes, pitch, a_start, b_start, a_width, b_width):
    b, s, h = sizes
    memory = torch.zeros(4000, dtype=BF16)
    a = memory.as_strided((b, s, h, a_width), (s * pitch, pitch, a_width, 1), a_start)
    c = memory.as_strided((b, s, b_width), (s * pitch, pitch, 1), b_start)
    shared = {a_start + p for p in places(a.shape, a.stride())} & {
        b_start + p for p in places(c.shape, c.stride())
    }
    assert are_interleaved(a, c) == are_interleaved(c, a) or shared == set()
    if are_interleaved(a, c):
        assert not shared
    in_row = a_start % pitch + h * a_width <= b_start % pitch
    if in_row and b_start % pitch + b_width <= pitch and b * s > 1:
        assert are_interleaved(a, c), "bands of one row"


def test_bands_of_a_slab_are_interleaved_whatever_axis_has_one_element():
    slab = torch.zeros(3, 4, 100, dtype=BF16)
    for rows in (slab, slab[:1], slab[:, :1], slab[:1, :1], slab[:, ::2]):
        q, k = rows[..., :40].unflatten(-1, (5, 8)), rows[..., 48:64].unflatten(-1, (2, 8))
        assert are_interleaved(q, k) or q.data_ptr() + 80 <= k.data_ptr()
        assert not are_interleaved(q, q)
        assert not are_interleaved(q, rows[..., 32:48])


def table(**options):
    rows = vector_strides(8, is_written=True)
    return OperandTable(
        (
            Operand("o", BF16, ("B", 8), vector_strides(8)),
            Operand("out", BF16, ("B", 8), rows, is_mutated=True, **options),
        )
    )


def check(operands, *tensors):
    operands.check_call(tensors, {"B": 9}, torch.device("cpu"))


def test_an_operand_may_be_another_only_as_a_whole_and_only_by_contract():
    wide = torch.zeros(4, 16, dtype=BF16)
    o = wide[:, :8]
    check(table(may_be="o"), o, o)
    check(table(may_be="o"), o, wide[:, 8:])
    with pytest.raises(ContractError, match="^out: expected memory of its own"):
        check(table(), o, o)
    with pytest.raises(ContractError, match="apart from o, got overlapping byte ranges"):
        check(table(may_be="o"), wide[:3, :8], wide[1:, :8])
    flat = torch.zeros(80, dtype=BF16)
    with pytest.raises(ContractError, match="^out: expected memory of its own"):
        check(table(may_be="o"), flat[:32].view(4, 8), flat.as_strided((4, 8), (16, 1)))
