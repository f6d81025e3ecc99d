# SPDX-License-Identifier: Apache-2.0
"""The oracle of the precision modes against torch's casts, closed forms and the BF16 oracle."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.helpers.gated_attention_precision import (
    MODES,
    cosine,
    dequantise,
    make_precision_problem,
    quantise,
)
from tests.helpers.gated_attention_problem import make_problem
from tests.oracles import gated_attention_precision_reference as oracle
from tests.oracles import gated_attention_reference as plain


def test_e4m3_is_torchs_cast_where_torch_saturates_nothing():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = every[every.isfinite()]
    between = (finite[:-1, None] + torch.linspace(0, 1, 9) * finite.diff()[:, None]).flatten()
    x = torch.cat([finite, between, torch.randn(4096) * 2.0 ** torch.randint(-12, 8, (4096,))])
    x = x[x.abs() <= 448]
    expected = x.to(torch.float8_e4m3fn).double()
    assert torch.equal(oracle.e4m3(x), expected)


def test_e4m3_saturates_and_ties_to_even():
    """S31."""
    x = torch.tensor([256, 272, 300, 304, 448, 464, 465, 1e4, -1e4, math.inf])
    assert oracle.e4m3(x).tolist() == [256, 256, 288, 320, 448, 448, 448, 448, -448, 448]
    assert oracle.e4m3(torch.tensor([math.nan])).isnan().all()


def test_e2m1_takes_the_nearest_level():
    x = torch.linspace(-8, 8, 3201)
    levels = torch.tensor(sorted({*oracle.E2M1, *(-v for v in oracle.E2M1)}))
    distance = (x[:, None] - levels).abs()
    found = oracle.e2m1(x)
    assert torch.allclose((x - found).abs().float(), distance.amin(1))
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert oracle.e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]


def test_scales_of_tiny_and_dead_blocks():
    """S30: the scale of a block is never NaN or above its values for want of a smaller one."""
    amax = torch.tensor([0.0, 2.0**-130, 2.0**-125, 448.0, 449.0, math.nan])
    scale = oracle.block_scales(amax, 448.0, has_e8m0=True)
    assert scale[:5].tolist() == [2.0**-127, 2.0**-127, 2.0**-127, 1.0, 2.0]
    assert bool(scale[5].isnan())
    for tiny in (2.0**-125, 2.0**-130):
        block = torch.full((32,), tiny, dtype=torch.float64)
        assert torch.equal(oracle.FORMATS["mxfp8"](block), block)
    dead = torch.zeros(32)
    for name, block in oracle.FORMATS.items():
        assert torch.equal(block(dead), dead.double()), name
    one_nan = torch.cat([torch.full((32,), math.nan), torch.ones(32)])
    assert oracle.FORMATS["mxfp8"](one_nan)[32:].tolist() == [1.0] * 32


def test_nibbles_and_scales_in_their_places():
    """S32."""
    packed, _ = quantise(torch.tensor([[0.5, 6.0, *[0.0] * 14]]), "nvfp4")
    assert packed.view(torch.uint8)[0, 0] == 0x71
    packed, _ = quantise(torch.tensor([[1.0, -2.0, 3.0, -4.0, 6.0, *[0.0] * 11]]), "nvfp4")
    assert packed.view(torch.uint8)[0, :2].tolist() == [0xC2, 0xE5]
    places = {(33, 4): 532, (129, 0): 1040, (129, 4): 1552}
    assert {place: oracle.blob_offset(*place, 5) for place in places} == places
    scales = (torch.arange(650) % 251 + 1).to(torch.uint8).view(130, 5)
    blob = oracle.make_blob(scales)
    assert len(blob) == 2048
    assert [int(blob[offset]) for offset in places.values()] == [
        int(scales[place]) for place in places
    ]
    assert int((blob == 0).sum()) == 2048 - 650


def test_without_points_it_is_the_bf16_oracle():
    problem = make_problem(batch=2, tokens=7, seq_lens=[3, 7])
    operands = [problem.operands[name] for name in ("h", "w_qkvg", "w_q_norm", "w_k_norm")]
    operands += [problem.operands[name] for name in ("cos", "sin", "w_o")]
    out, lse = oracle.gated_attention(*operands, problem.geometry, [3, 7])
    expected = plain.gated_attention(*operands, problem.geometry, [3, 7])
    assert cosine(out, expected.out) > 0.9999
    rounded = dataclasses.replace(
        oracle.Points(), slab=oracle.bf16, gate=oracle.bf16, normed=oracle.bf16, o=oracle.bf16
    )
    out, lse = oracle.gated_attention(*operands, problem.geometry, [3, 7], rounded)
    torch.testing.assert_close(out, expected.out, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, expected.lse, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", MODES)
def test_stated_points_keep_the_layer(name):
    """The rounding that a mode states costs no more than its cosine allows."""
    torch.manual_seed(1)
    problem = make_precision_problem(MODES[name], tokens=40)
    exact, _ = problem.expected_at(None)
    stated, _ = problem.expected_at(problem.points)
    assert cosine(stated, exact) > problem.mode.cosine


@pytest.mark.parametrize("kind", oracle.FORMATS)
def test_codes_and_blob_stand_for_the_rounded_values(kind):
    torch.manual_seed(2)
    x = torch.randn(5, 128) * 2.0 ** torch.randint(-20, 20, (5, 1))
    codes, blob = quantise(x, kind)
    assert torch.equal(dequantise(codes, blob, kind), oracle.FORMATS[kind](x))
    assert dequantise(codes, torch.full_like(blob, 0x7F), kind).isnan().all() == (kind == "nvfp4")
