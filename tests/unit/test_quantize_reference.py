# SPDX-License-Identifier: Apache-2.0
"""The reference quantisers against torch's and ml_dtypes' casts and against exact arithmetic."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from cudnn_blocks import ops
from cudnn_blocks.quant_spec import BLOCK_FORMATS, E4M3, E8M0, MXFP4, MXFP8, NVFP4
from cudnn_blocks.reference import quantize as ref
from cudnn_blocks.reference.scale_blobs import blob_bytes, pack_scales, unpack_scales
from tests.helpers.quantize_problem import make_blocks

DTYPES = (torch.bfloat16, torch.float16)
FORMATS = pytest.mark.parametrize("block", BLOCK_FORMATS.values(), ids=str)


def every(dtype):
    """All 2**16 patterns of a 16-bit dtype, as FP32."""
    pattern = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return pattern.view(dtype).float()


def fp32_near_ties(values):
    """Numbers, their midpoints, and the FP32 neighbours of both, of either sign."""
    values = torch.tensor(sorted(values), dtype=torch.float32)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    bits = points.view(torch.int32)
    near = torch.cat([bits, (bits - 1).clamp(min=0), bits + 1]).view(torch.float32)
    return torch.cat([near, -near])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.37, 448.0, 2.0**-9, 1e-4])
def test_e4m3_of_every_pattern_is_what_the_casts_give(dtype, scale):
    x = every(dtype) * torch.tensor(scale)
    codes = ref.encode_e4m3(x)
    bounded = x.clamp(-448, 448)
    assert torch.equal(codes[~x.isnan()], bounded.to(E4M3).view(torch.uint8)[~x.isnan()])
    theirs = bounded.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(codes[~x.isnan()].numpy(), theirs[~x.isnan().numpy()])
    assert (codes[x.isnan()] == 0x7F).all()
    assert not ((codes & 0x7F) == 0x7F)[~x.isnan()].any()


def test_e4m3_by_hand():
    """S31: saturation and ties."""
    x = [256.0, 272, 300, 304, 448, 464, 465, 1e4, -1e4, math.inf, -math.inf, 2.0**-10, 0.0, -0.0]
    y = [256.0, 256, 288, 320, 448, 448, 448, 448, -448, 448, -448, 0, 0, -0.0]
    codes = ops.quantize_fp8(torch.tensor([[*x, 3 * 2.0**-10, math.nan]]).bfloat16(), 1.0)
    assert torch.equal(codes.float()[0, :14], torch.tensor(y))
    assert codes.view(torch.uint8)[0, 11:].tolist() == [0, 0, 0x80, 2, 0x7F]
    x32 = torch.tensor([465.0, 463.9, 3.4e38])
    assert (ref.encode_e4m3(x32) == 0x7E).all()


def test_e4m3_between_neighbours_and_ties():
    values = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float().tolist()
    x = fp32_near_ties(values)
    theirs = x.clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(ref.encode_e4m3(x).numpy(), theirs)


@pytest.mark.parametrize("x", [every(torch.bfloat16), every(torch.float16), None])
def test_e2m1_is_what_ml_dtypes_gives(x):
    x = fp32_near_ties(ref.E2M1_VALUES) if x is None else x[~x.isnan()]
    theirs = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(ref.encode_e2m1(x).numpy(), theirs & 15)


def test_decoding_every_code():
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    torch.testing.assert_close(ref.decode(codes, None), theirs, rtol=0, atol=0, equal_nan=True)
    packed = ref.decode(codes[None], MXFP4)[0].view(256, 2)
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(packed[:, 0].numpy(), nibbles[codes.numpy() & 15])
    assert np.array_equal(packed[:, 1].numpy(), nibbles[codes.numpy() >> 4])
    assert np.signbit(packed[8, 0].item())
    scales = ref.decode_scales(codes, MXFP8)
    torch.testing.assert_close(scales, codes.view(E8M0).float(), rtol=0, atol=0, equal_nan=True)
    theirs = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(scales.numpy(), theirs, equal_nan=True)
    assert scales[[0, 127, 134, 254]].tolist() == [2.0**-127, 1, 128, 2.0**127]
    assert scales[255].isnan()


def test_packing():
    """S32: the even element is the low nibble."""
    codes = ref.encode_e2m1(torch.tensor([0.5, 6.0, 1, -2, 3, -4]))
    assert ref.pack_e2m1(codes).tolist() == [0x71, 0xC2, 0xE5]
    assert torch.equal(ref.unpack_e2m1(ref.pack_e2m1(codes)), codes)


def test_blobs():
    """S32: the place of every scale, padding as 0."""
    scales = torch.arange(130 * 5).view(130, 5) % 251 + 1
    blob = pack_scales(scales.to(torch.uint8))
    assert blob.numel() == blob_bytes(130, 5) == 2048
    for (row, column), offset in {(33, 4): 532, (129, 0): 1040, (129, 4): 1552}.items():
        assert blob[offset] == scales[row, column]
    assert torch.equal(unpack_scales(blob, 130, 5), scales.to(torch.uint8))
    assert (blob != 0).sum() == scales.numel()
    many = torch.randint(0, 256, (2, 3, 7, 9), dtype=torch.uint8)
    assert torch.equal(unpack_scales(pack_scales(many), 7, 9), many)
    assert torch.equal(pack_scales(many)[1, 2], pack_scales(many[1, 2]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [MXFP8, MXFP4], ids=str)
def test_e8m0_is_the_smallest_power_that_fits(dtype, block):
    """Every amax, against integers: ceil(log2(amax / largest)), clamped."""
    amax = every(dtype).abs()
    amax = amax[amax.isfinite()]
    codes = ref.encode_scales(amax, block)
    largest = ref.LARGEST[block.code_dtype]
    mantissa, exponent = np.frexp(amax.double().numpy() / largest)
    power = np.where(mantissa == 0.5, exponent - 1, exponent)
    expected = np.where(amax.numpy() == 0, 0, np.clip(power, -127, 127) + 127)
    assert np.array_equal(codes.numpy(), expected)
    # So nothing saturates: not even where fp32(1 / largest) is rounded.
    fits = amax.double() <= largest * ref.decode_scales(codes, block).double()
    assert fits.all()
    edges = ref.encode_scales(torch.tensor([math.inf, math.nan]), block)
    assert edges.tolist() == [254, 255]


def test_the_factors_are_those_of_the_contract():
    one = torch.ones(())
    assert (one / 6).view(torch.int32).item() == 0x3E2AAAAB
    assert (one / 448).view(torch.int32).item() == 0x3B124925


def test_nvfp4_scales():
    amax = every(torch.bfloat16).abs()
    amax = amax[~amax.isnan()]
    codes = ref.encode_scales(amax, NVFP4)
    exact = amax.double() * (1 / 6)
    scale = codes.view(E4M3).double()
    assert ((scale - exact).abs() <= exact / 16)[(exact > 2.0**-6) & (exact < 448)].all()
    assert (codes[amax == 0] == 1).all()
    assert (codes[amax > 448 * 6] == 0x7E).all()
    assert ref.encode_scales(torch.tensor([math.nan]), NVFP4).item() == 0x7F


def round_trip(values, fmt):
    """Codes, scale bytes and numbers of one row."""
    x = torch.tensor([values]).bfloat16()
    codes, scales = ops.quantize_block(x, fmt)
    y = ops.dequantize_block(codes, scales, fmt)
    return codes.view(torch.uint8)[0], scales.view(torch.uint8), y[0]


def test_small_blocks():
    """S30: no NaN and no saturation at the end of the scale's range."""
    for power, code in ((-125, 0x48), (-130, 0x20)):
        codes, scales, y = round_trip([2.0**power] * 32, "mxfp8")
        assert scales[0] == 0
        assert (codes == code).all()
        assert (y == 2.0**power).all()


@FORMATS
def test_zeros_are_dead_blocks(block):
    codes, scales, y = round_trip([0.0] * 64, block.name)
    assert not codes.any()
    assert not y.any()
    assert scales[0] == (1 if block is NVFP4 else 0)
    codes, _, y = round_trip([-0.0] * 64, block.name)
    assert y.signbit().all(), "the sign of zero is kept"


@FORMATS
def test_nan_stays_in_its_block(block):
    size = block.block_size
    values = [1.0] * (3 * size)
    clean = round_trip(values, block.name)
    values[size] = math.nan
    codes, scales, y = round_trip(values, block.name)
    assert y[size : 2 * size].isnan().all()
    assert scales[1] == (0x7F if block is NVFP4 else 0xFF)
    one = size // block.codes_per_byte
    assert not codes[one : 2 * one].any()
    for part in (slice(0, size), slice(2 * size, 3 * size)):
        assert torch.equal(y[part], clean[2][part])


@FORMATS
def test_infinities_saturate(block):
    _, scales, y = round_trip([math.inf, -math.inf] + [1.0] * 30, block.name)
    largest = 2688.0 if block is NVFP4 else torch.finfo(torch.bfloat16).max
    assert y[:2].tolist() == [largest, -largest]
    assert scales[0] == (0x7E if block is NVFP4 else 254)
    assert y.isfinite().all()


@FORMATS
def test_codes_are_the_nearest_to_the_quotient_in_exact_arithmetic(block):
    """Every e4m3 significand among the scales, in FP64, where the division is exact enough."""
    problem = make_blocks(block.name, (64, 512), is_wild=True).run()
    scales = unpack_scales(
        problem["scales"].view(torch.uint8), 64, 512 // block.block_size
    ).contiguous()
    divisor = ref.decode_scales(scales, block).double()[..., None]
    quotient = problem["x"].double().unflatten(-1, (-1, block.block_size)) / divisor
    table = ref.decode(torch.arange(256, dtype=torch.uint8)[None], block)[0].double()
    table = table[table.isfinite()].unique()
    got = ref.decode(problem["codes"], block).double().unflatten(-1, (-1, block.block_size))
    usable = quotient.isfinite()
    best = (quotient[..., None] - table).abs().amin(-1)
    assert torch.equal((quotient - got).abs()[usable], best[usable])


def test_products_beyond_bf16():
    codes = torch.tensor([[0x7E, 0x01, 0x06, 0x04] * 8], dtype=torch.uint8)
    for byte, expected in (
        (254, [torch.finfo(torch.bfloat16).max, 2.0**118, 6 * 2.0**118, 2.0**120]),
        (0, [448 * 2.0**-127, 0.0, 2.0**-133, 0.0]),  # 1, 6 and 4 eighths of the smallest number
        (3, [448 * 2.0**-124, 2.0**-133, 6 * 2.0**-133, 2.0**-131]),
    ):
        blob = torch.full((blob_bytes(1, 1),), byte, dtype=torch.uint8)
        y = ops.dequantize_block(codes, blob, "mxfp8")
        assert y[0, :4].double().tolist() == pytest.approx(expected, rel=0, abs=0), byte


def test_blocks_along_tokens():
    """As rows of the transposed values, S ending within a block; tokens past the length are 0."""
    problem = make_blocks("mxfp8", (2, 70, 3, 40), along_tokens=True, seq_lens=[70, 33])
    x = problem["x"].clone()
    x[1, 33:] = math.nan
    problem = problem.with_(x=x).run()
    codes = problem["codes"].view(torch.uint8)
    y = ops.dequantize_block(problem["codes"], problem["scales"], "mxfp8", along_tokens=True)
    assert not codes[1, 33:].any()
    assert y.isfinite().all()
    size = blob_bytes(40, 3)
    for b, length in ((0, 70), (1, 33)):
        for h in range(3):
            rows = torch.zeros(40, 96, dtype=torch.bfloat16)
            rows[:, :length] = x[b, :length, h].T
            row_codes, row_scales = ops.quantize_block(rows, "mxfp8")
            assert torch.equal(codes[b, :, h], row_codes.view(torch.uint8)[:, :70].T)
            blob = problem["scales"].view(torch.uint8)[(b * 3 + h) * size :][:size]
            assert torch.equal(blob, row_scales.view(torch.uint8))
            back = ops.dequantize_block(row_codes, row_scales, "mxfp8")
            assert torch.equal(y[b, :, h], back[:, :70].T)


@FORMATS
def test_padding_bytes_change_nothing(block):
    problem = make_blocks(block.name, (2, 37, 3, 96)).run()
    raw = problem["scales"].view(torch.uint8)
    ones = pack_scales(torch.ones(6, 37, 96 // block.block_size, dtype=torch.uint8))
    is_padding = ones.flatten() == 0
    assert is_padding.any()
    assert not raw[is_padding].any()
    expected = ops.dequantize_block(problem["codes"], problem["scales"], block.name)
    raw[is_padding] = 0xFF
    assert torch.equal(
        ops.dequantize_block(problem["codes"], problem["scales"], block.name), expected
    )
