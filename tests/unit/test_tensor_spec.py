# SPDX-License-Identifier: Apache-2.0
"""TensorSpec: what is remembered of a sample, real or not."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_blocks import TensorSpec
from cudnn_blocks.tensor_spec import has_storage, row_major_stride


@given(st.lists(st.integers(0, 7), max_size=5))
def test_row_major_stride_is_torchs(shape):
    assert row_major_stride(shape) == torch.empty(shape, device="meta").stride()


def test_of_a_real_tensor():
    spec = TensorSpec.of("x", torch.zeros(4, 16, dtype=torch.float16)[:, :8])
    assert (spec.dtype, spec.shape, spec.stride) == (torch.float16, (4, 8), (16, 1))
    assert spec.device == torch.device("cpu")
    assert spec.alignment_bytes >= 16
    assert not spec.requires_grad


@pytest.mark.parametrize(("offset", "alignment_bytes"), [(1, 2), (2, 4), (4, 8), (8, 16)])
def test_alignment_is_read_off_the_address(offset, alignment_bytes):
    base = torch.zeros(64, dtype=torch.float16)
    assert base.data_ptr() % 64 == 0
    assert TensorSpec.of("x", base[offset:]).alignment_bytes == alignment_bytes


def test_meta_and_fake_tensors_have_no_address():
    with FakeTensorMode():
        fake = torch.empty(2, 3)
    for tensor in (torch.empty(2, 3, device="meta"), fake):
        assert not has_storage(tensor)
        spec = TensorSpec.of("x", tensor)
        assert spec.alignment_bytes is None
        assert spec.shape == (2, 3)
    assert TensorSpec.of("x", fake).device == torch.device("cpu")


def test_parameters_count_as_plain_tensors():
    spec = TensorSpec.of("weight", torch.nn.Parameter(torch.zeros(2)))
    assert spec.requires_grad
    assert spec.alignment_bytes is not None


def test_a_spec_stands_for_itself():
    spec = TensorSpec.contiguous((2, 3), torch.bfloat16)
    assert TensorSpec.of("x", spec) is spec
    assert (spec.stride, spec.device) == ((3, 1), torch.device("meta"))


@pytest.mark.parametrize("sample", [None, [1.0], 3, "x"])
def test_anything_else_is_a_type_error_that_names_the_argument(sample):
    with pytest.raises(TypeError, match=r"^sample_x: expected a torch\.Tensor or TensorSpec, got"):
        TensorSpec.of("sample_x", sample)


def test_the_sample_is_not_retained():
    tensor = torch.zeros(4)
    alive = weakref.ref(tensor)
    spec = TensorSpec.of("x", tensor)
    del tensor
    gc.collect()
    assert alive() is None
    assert spec.shape == (4,)


def test_prints_what_matters():
    text = str(TensorSpec.contiguous((2, 3), torch.bfloat16, "cpu"))
    assert text == "bfloat16 [2, 3] strides (3, 1) on cpu"
