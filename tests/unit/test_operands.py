# SPDX-License-Identifier: Apache-2.0
"""Operand and OperandTable: stride rules, shapes, presence, alignment, overlap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cudnn_blocks import ContractError, GradModeError, TensorSpec
from cudnn_blocks.operands import (
    Contiguous,
    Operand,
    OperandTable,
    RowPitch,
    StateLayout,
    byte_span,
)
from cudnn_blocks.tensor_spec import row_major_stride

CPU = torch.device("cpu")
SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@given(SHAPES)
def test_contiguous_agrees_with_torch(shape):
    stride = torch.empty(shape).stride()
    assert Contiguous().accepts(shape, stride)


@given(SHAPES, st.data())
def test_contiguous_judges_strides_as_torch_does(shape, data):
    stride = data.draw(
        st.lists(st.integers(1, 30), min_size=len(shape), max_size=len(shape)).map(tuple)
    )
    tensor = torch.empty_strided(shape, stride, device="meta")
    assert Contiguous().accepts(shape, stride) == tensor.is_contiguous()


@given(st.integers(0, 5), st.integers(1, 20), st.integers(1, 64), st.integers(1, 3))
def test_row_pitch(rows, columns, ld, column_stride):
    legal_ld = rows <= 1 or ld == columns or (ld > columns and ld % 8 == 0)
    legal_column = columns == 1 or column_stride == 1
    expected = rows == 0 or (legal_ld and legal_column)
    assert RowPitch(8).accepts((rows, columns), (ld, column_stride)) == expected


def test_row_pitch_says_what_is_legal():
    text = RowPitch(8).describe((3, 5))
    assert text == "strides (5, 1) or (ld, 1) with ld > 5, ld % 8 == 0"


def test_state_layout_is_exact_but_for_axes_of_one_element():
    rule = StateLayout((24, 1, 8))
    assert rule.accepts((2, 8, 3), (24, 1, 8))
    assert not rule.accepts((2, 8, 3), (24, 3, 1))
    assert rule.accepts((1, 8, 3), (999, 1, 8))
    assert rule.accepts((2, 1, 3), (24, 7, 8))
    assert rule.accepts((0, 8, 3), (5, 5, 5))
    assert rule.describe(()) == "strides (24, 1, 8)"


def operand(name="x", shape=("N", 8), **kw) -> Operand:
    return Operand(name, torch.float32, shape, kw.pop("strides", Contiguous()), **kw)


def spec_of(shape, stride=None, dtype=torch.float32, alignment_bytes=None) -> TensorSpec:
    return TensorSpec(dtype, shape, stride or row_major_stride(shape), CPU, alignment_bytes)


@pytest.mark.parametrize(
    ("spec", "expected", "got"),
    [
        (spec_of((2, 8), dtype=torch.int32), "dtype torch.float32", "torch.int32"),
        (spec_of((2, 8, 1)), "shape [N, 8]", "[2, 8, 1]"),
        (spec_of((2, 9)), "shape [N = 2, 8]", "[2, 9] (axis 1 is 9, not 8)"),
        (spec_of((2, 8), (16, 1)), "contiguous strides (8, 1)", "(16, 1)"),
        (
            spec_of((2, 8), alignment_bytes=4),
            "a 16-byte aligned address",
            "an address aligned to 4 bytes",
        ),
    ],
)
def test_one_operand_refuses(spec, expected, got):
    with pytest.raises(ContractError) as refused:
        operand().check(spec, {})
    error = refused.value
    assert (error.operand, error.expected) == ("x", expected)
    assert str(error) == f"x: expected {expected}, got {got}"


def test_symbols_bind_at_first_use_and_hold_after():
    bound = {}
    operand("x").check(spec_of((3, 8)), bound)
    assert bound == {"N": 3}
    operand("out").check(spec_of((3, 8)), bound)
    with pytest.raises(ContractError, match=r"^out: expected shape \[N = 3, 8\], got \[4, 8\]"):
        operand("out").check(spec_of((4, 8)), bound)


def test_an_empty_tensor_has_no_address_to_align():
    operand().check(spec_of((0, 8), alignment_bytes=1), {})


def test_an_unknown_address_is_not_judged():
    operand().check(spec_of((2, 8), alignment_bytes=None), {})


def table(**kw) -> OperandTable:
    return OperandTable(
        (
            operand("x", strides=RowPitch(8)),
            operand("bias", (8,), is_declared=kw.get("has_bias", False)),
            operand("out", is_mutated=True),
        )
    )


def tensors(rows=3):
    return [torch.zeros(rows, 8), None, torch.zeros(rows, 8)]


def test_a_good_call_returns_its_extents():
    assert table().check_call(tensors(), {"N": 3}, CPU) == {"N": 3}
    assert table().check_call(tensors(0), {"N": 3}, CPU) == {"N": 0}


def test_larger_than_the_sample():
    with pytest.raises(ContractError, match="^N: expected at most 2, the sample's, got 3$"):
        table().check_call(tensors(), {"N": 2}, CPU)


def test_declared_but_not_supplied():
    with pytest.raises(
        ContractError, match="^bias: expected a tensor, as declared at construction"
    ):
        table(has_bias=True).check_call(tensors(), {"N": 3}, CPU)


def test_supplied_but_not_declared():
    x, _, out = tensors()
    with pytest.raises(ContractError, match="^bias: expected None, since it was not declared, got"):
        table().check_call([x, torch.zeros(8), out], {"N": 3}, CPU)


def test_not_a_tensor():
    x, _, out = tensors()
    with pytest.raises(TypeError, match=r"^x: expected a torch\.Tensor or TensorSpec, got list"):
        table().check_call([x.tolist(), None, out], {"N": 3}, CPU)


def test_another_device():
    x, _, out = tensors()
    with pytest.raises(ContractError, match="^out: expected a tensor on cpu, got meta$"):
        table().check_call([x, None, out.to("meta")], {"N": 3}, CPU)


def test_grad():
    x, _, out = tensors()
    x.requires_grad_()
    with pytest.raises(GradModeError, match="^x: requires grad while grad mode is on"):
        table().check_call([x, None, out], {"N": 3}, CPU)
    with torch.no_grad():
        table().check_call([x, None, out], {"N": 3}, CPU)


@pytest.mark.parametrize("first_row", range(-2, 3))
def test_overlap_is_judged_byte_by_byte(first_row):
    memory = torch.zeros(6, 8)
    x, out = memory[2:4], memory[2 + first_row : 4 + first_row]
    call = [x, None, out]
    disjoint = abs(first_row) >= 2
    assert table().is_disjoint(call) == disjoint
    if disjoint:
        table().check_call(call, {"N": 2}, CPU)
    else:
        with pytest.raises(ContractError, match="^out: expected memory of its own, .* from x, got"):
            table().check_call(call, {"N": 2}, CPU)


def test_operands_that_are_only_read_may_share_memory():
    shared = torch.zeros(8)
    both = OperandTable((operand("a", (8,)), operand("b", (8,))))
    both.check_call([shared, shared], {}, CPU)


def test_empty_tensors_overlap_nothing():
    memory = torch.zeros(4, 8)
    table().check_call([memory[:0], None, memory[:0]], {"N": 2}, CPU)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_byte_span_is_the_reach_of_the_elements(shape, data):
    stride = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    tensor = torch.zeros(200, dtype=torch.float64).as_strided(shape, stride, 7)
    addresses = [tensor[tuple(index)].data_ptr() for index in torch.ones(shape).nonzero().tolist()]
    assert byte_span(tensor) == (min(addresses), max(addresses) + 8)


def test_canonical_changes_the_strides_of_one_element_axes_only():
    x = torch.zeros(40).as_strided((1, 8), (33, 1))
    out = torch.zeros(2, 16)[:, :8]
    canonical_x, none, canonical_out = table().canonical([x, None, out])
    assert canonical_x.stride() == (8, 1)
    assert canonical_x.data_ptr() == x.data_ptr()
    assert none is None
    assert canonical_out is out


def test_samples_give_the_limits():
    specs = {"x": spec_of((5, 8)), "out": spec_of((5, 8))}
    assert table().check_samples(specs) == {"N": 5}
