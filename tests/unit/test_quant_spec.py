# SPDX-License-Identifier: Apache-2.0
"""Precision specs: what they hold, what validate() refuses, by name."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from cudnn_blocks import ContractError, Fp4Format, MxQuantSpec, NotServedError, QuantSpec
from cudnn_blocks.quant_spec import (
    BLOCK_FORMATS,
    E2M1_X2,
    E4M3,
    E8M0,
    MXFP4,
    MXFP8,
    NVFP4,
    PER_TENSOR_SCALES,
)

SCALES = [
    field.name
    for field in dataclasses.fields(QuantSpec)
    if field.name not in ("dtype", "fast_accumulation")
]


def make_spec(**changes):
    return QuantSpec(**{**dict.fromkeys(SCALES, 1.0), **changes})


def test_every_scale_is_listed():
    assert list(PER_TENSOR_SCALES) == SCALES


def test_accumulation_is_accurate_unless_asked():
    """The last field of both, so that nothing that was spelled by position moves."""
    for spec in (make_spec(), MxQuantSpec(1.0)):
        assert dataclasses.fields(spec)[-1].name == "fast_accumulation"
        assert spec.fast_accumulation is False
        fast = dataclasses.replace(spec, fast_accumulation=True)
        fast.validate()
        assert fast != spec


def test_products_of_scales():
    spec = QuantSpec(0.5, 0.25, 3.0, 1.0, 1.0, 1.0, 4.0)
    spec.validate()
    assert (spec.alpha_qkvg, spec.alpha_o) == (0.125, 0.75)
    assert MxQuantSpec(3.0, 4.0).alpha_o == 0.75
    assert spec == make_spec(descale_h=0.5, descale_w_qkvg=0.25, descale_w_o=3.0, scale_o=4.0)
    assert hash(spec) != hash(make_spec())


@pytest.mark.parametrize("name", SCALES)
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e-40, 1e39])
def test_every_scale_is_a_positive_normal_number(name, value):
    with pytest.raises(ContractError, match=f"^{name}: expected a positive normal FP32 number"):
        make_spec(**{name: value}).validate()
    if name in ("descale_w_o", "scale_o"):
        with pytest.raises(ContractError, match=f"^{name}: expected a positive normal"):
            MxQuantSpec(**{"descale_w_o": 1.0, name: value}).validate()


def test_products_that_fp32_does_not_hold():
    with pytest.raises(ContractError, match=r"^descale_h \* descale_w_qkvg: expected"):
        make_spec(descale_h=1e-30, descale_w_qkvg=1e-30).validate()
    for spec in (make_spec(scale_o=1e-30, descale_w_o=1e30), MxQuantSpec(1e30, 1e-30)):
        with pytest.raises(ContractError, match="^descale_w_o / scale_o: expected"):
            spec.validate()


@pytest.mark.parametrize("make", [make_spec, lambda **fields: MxQuantSpec(1.0, **fields)])
def test_code_dtypes(make):
    with pytest.raises(NotServedError, match=r"dtype=torch.float8_e5m2 .* torch.float8_e4m3fn"):
        make(dtype=torch.float8_e5m2).validate()
    for dtype in (torch.bfloat16, E2M1_X2):
        with pytest.raises(ContractError, match="^dtype: expected torch.float8_e4m3fn"):
            make(dtype=dtype).validate()


def test_weights_of_the_block_scaled_modes():
    assert MxQuantSpec(1.0).w_qkvg_format is MXFP8
    spec = MxQuantSpec(1.0, w_qkvg_dtype=E2M1_X2)
    spec.validate()
    assert spec.w_qkvg_format is MXFP4
    with pytest.raises(NotServedError, match="w_qkvg_dtype=torch.float8_e5m2"):
        MxQuantSpec(1.0, w_qkvg_dtype=torch.float8_e5m2).validate()
    with pytest.raises(ContractError, match="^w_qkvg_dtype: expected .* or .*e2m1"):
        MxQuantSpec(1.0, w_qkvg_dtype=torch.bfloat16).validate()
    for size in (16, 0, 64):
        with pytest.raises(ContractError, match="^block_size: expected 32"):
            MxQuantSpec(1.0, block_size=size).validate()


@pytest.mark.parametrize("fmt", Fp4Format)
def test_fields_without_a_consumer_are_neutral(fmt):
    MxQuantSpec(1.0, o_fp4=fmt).validate()
    with pytest.raises(ContractError, match=r"^fast_accumulation: expected False with o_fp4"):
        MxQuantSpec(1.0, o_fp4=fmt, fast_accumulation=True).validate()
    for name in ("descale_w_o", "scale_o"):
        with pytest.raises(ContractError, match=rf"^{name}: expected 1.0 with o_fp4"):
            MxQuantSpec(**{"descale_w_o": 1.0, name: 2.0}, o_fp4=fmt).validate()


def test_a_format_is_its_triple():
    rows = {
        "mxfp8": (E4M3, E8M0, 32, 1),
        "mxfp4": (E2M1_X2, E8M0, 32, 2),
        "nvfp4": (E2M1_X2, E4M3, 16, 2),
    }
    for name, block in BLOCK_FORMATS.items():
        assert rows[name] == (
            block.code_dtype,
            block.scale_dtype,
            block.block_size,
            block.codes_per_byte,
        )
        assert str(block) == name
    assert [fmt.value for fmt in Fp4Format] == [NVFP4, MXFP4]
    assert [(f.fmt_name, f.block_size, f.sf_torch_dtype) for f in Fp4Format] == [
        ("nvfp4", 16, E4M3),
        ("mxfp4", 32, E8M0),
    ]


def test_strict_types():
    for make, match in (
        (lambda: make_spec(scale_q="1"), "^QuantSpec.scale_q: "),
        (lambda: make_spec(dtype="e4m3"), "^QuantSpec.dtype: "),
        (lambda: MxQuantSpec(True), "^MxQuantSpec.descale_w_o: "),
        (lambda: MxQuantSpec(1.0, o_fp4="nvfp4"), "^MxQuantSpec.o_fp4: "),
        (lambda: MxQuantSpec(1.0, o_fp8=1), "^MxQuantSpec.o_fp8: "),
        (lambda: make_spec(fast_accumulation=1), "^QuantSpec.fast_accumulation: "),
        (lambda: MxQuantSpec(1.0, fast_accumulation=1), "^MxQuantSpec.fast_accumulation: "),
    ):
        with pytest.raises(TypeError, match=match):
            make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_spec().scale_q = 2.0
