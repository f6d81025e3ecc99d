# SPDX-License-Identifier: Apache-2.0
"""DequantGemm on the GPU at hand against its reference."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks.quant_spec import BLOCK_FORMATS
from cudnn_blocks.reference.dequant_gemm import dequant_gemm
from tests.helpers.dequant_gemm_problem import make_dequant_gemm
from tests.helpers.gemm_gpu import CUDA, ENGINES
from tests.helpers.tensors import guarded_copy

pytestmark = pytest.mark.gpu
FORMATS = tuple(BLOCK_FORMATS)
SHAPES = [
    (1, 1, 9216, 2048),
    (2, 16, 2048, 4096),
    (1, 64, 520, 416),
    (5, 20, 136, 96),
    (1, 128, 264, 160),
    (3, 111, 1288, 1024),
    (1, 64, 264, 4128),  # x does not fit shared memory at once
]
SPARSE_SHAPES = [(1, 7, 520, 416), (1, 16, 264, 4128), (1, 30, 1288, 2048), (1, 40, 2048, 4096)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_sums_have_the_bits_of_the_reference(fmt, shape, engine):
    problem = make_dequant_gemm(fmt, shape, pads=(8, 16), device=CUDA)
    copy, buffer = guarded_copy(problem.operands["y"])
    y = problem.with_(y=copy).run(engines={"dequant_gemm": engine})
    assert torch.equal(y, problem.expected())
    assert buffer.is_intact()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("x_format", FORMATS)
@pytest.mark.parametrize("tokens", [5, 200])
def test_codes_of_x(fmt, x_format, tokens):
    problem = make_dequant_gemm(fmt, (1, tokens, 136, 96), x_format=x_format, device=CUDA)
    assert torch.equal(problem.run(), problem.expected())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [7, 32, 300])
def test_sums_of_any_data_are_fp32(fmt, rows):
    problem = make_dequant_gemm(fmt, (1, rows, 2048, 2048), data="normal", device=CUDA)
    y, one = problem.run(), BLOCK_FORMATS[fmt]
    x, w, w_sf = (problem.operands[name] for name in ("x", "w", "w_sf"))
    eye = torch.eye(2048, device=CUDA).bfloat16()[None]
    values = torch.empty(1, 2048, 2048, dtype=torch.bfloat16, device=CUDA)
    dequant_gemm(eye, None, w, w_sf, values, 1.0, None, one)
    values = values[0].double()
    expected = x.double() @ values * problem.alpha
    bound = expected.abs() * 2.0**-8 + (x.double().abs() @ values.abs()) * 2.0**-20
    assert ((y.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("code", [0, 1, 3, 246, 247, 252, 253, 254])
def test_scales_at_both_ends(fmt, code):
    problem = make_dequant_gemm(fmt, (1, 5, 136, 96), device=CUDA)
    x, w = problem.operands["x"].zero_(), problem.operands["w"]
    x[..., 0] = 2.0**-20 if code > 3 else 2.0**100
    w[:, 32 // BLOCK_FORMATS[fmt].codes_per_byte :] = 0
    problem = problem.with_(w_sf=torch.full_like(problem.operands["w_sf"], code))
    assert torch.equal(problem.run(), problem.expected())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows", [9, 200])
def test_nan_codes_of_scales_stay_in_their_columns(fmt, rows):
    problem = make_dequant_gemm(fmt, (1, rows, 136, 96), device=CUDA)
    clean = problem.run().clone()
    # Row 33 of the first tile, its first block: 32-row group 1, row 1.
    problem.operands["w_sf"][1 * 16 + 1 * 4] = 0x7F if fmt == "nvfp4" else 0xFF
    y = problem.run()
    assert y[..., 33].isnan().all()
    others = [n for n in range(136) if n != 33]
    assert torch.equal(y[..., others], clean[..., others])


@pytest.mark.parametrize(("fmt", "share"), [("mxfp4", 0.004), ("nvfp4", 0.05), ("mxfp8", 0.004)])
@pytest.mark.parametrize("shape", SPARSE_SHAPES, ids=str)
def test_special_scales_among_others(fmt, share, shape):
    # NaN, or a negative scale: in a few blocks, everywhere.
    problem = make_dequant_gemm(fmt, shape, device=CUDA)
    w_sf = problem.operands["w_sf"]
    special = w_sf ^ 0x80 if fmt == "nvfp4" else torch.full_like(w_sf, 0xFF)
    w_sf.copy_(torch.where(torch.rand(w_sf.shape, device=CUDA) < share, special, w_sf))
    y, expected = problem.run(), problem.expected()
    assert torch.equal(y.isnan(), expected.isnan())
    assert not y.isnan().all()
    assert torch.equal(y.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("code", [0x01, 0x07, 0x08, 0x7E, 0x80, 0xFE])
def test_e4m3_scales_of_every_kind(code):
    problem = make_dequant_gemm("nvfp4", (1, 5, 136, 96), device=CUDA)
    problem = problem.with_(w_sf=torch.full_like(problem.operands["w_sf"], code))
    assert torch.equal(problem.run(), problem.expected())


@pytest.mark.parametrize("fmt", FORMATS)
def test_infinite_activations_right_behind_a_part_of_k(fmt):
    # Two CTAs share 45 steps of 128, 23 and 22, and fill x twice, for 12 steps each time.
    problem = make_dequant_gemm(fmt, (1, 20, 264, 5664), device=CUDA)
    problem.operands["w"].fill_(0x22 if BLOCK_FORMATS[fmt].codes_per_byte == 2 else 0x38)
    problem.operands["x"][0, 3, 23 * 128] = torch.inf
    y = problem.run()
    assert y[0, 3].isposinf().all()
    assert torch.equal(y, problem.expected())
