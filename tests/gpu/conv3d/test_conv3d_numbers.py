# SPDX-License-Identifier: Apache-2.0
"""Every Conv3D engine against the reference: odd sizes, integer and random data, guards."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from cudnn_blocks import ops, pack_conv3d_weight
from tests.helpers.conv3d_forms import BIAS_PAD, CAUSAL, NORM, NORM_ONLY, NORM_PAD, RAW
from tests.helpers.conv3d_gpu import (
    CUDA,
    ENGINES,
    LARGE,
    SMALL,
    TALL,
    check,
    compiled_plan,
    odd_problems,
)
from tests.helpers.conv3d_problem import ATOL, RTOL, make_problem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # a convolution compiles for many seconds
ADD, BIASED = {"residual": "add"}, {"residual": "add_biased"}

HOPPER = [
    (RAW, (160, 160), SMALL, {}),
    (RAW, (160, 160), TALL, {}),
    (RAW, (160, 160), LARGE, {}),
    (RAW, (160, 320), SMALL, {}),
    (RAW, (320, 320), TALL, {}),
    (RAW, (320, 640), LARGE, {}),
    (RAW, (640, 640), SMALL, {}),
    (RAW, (96, 96), SMALL, {}),
    (RAW, (64, 384), SMALL, {}),
    (RAW, (256, 512), SMALL, {}),
    (NORM, (160, 160), SMALL, {}),
    (NORM, (160, 160), TALL, BIASED),
    (NORM, (160, 160), LARGE, ADD),
    (NORM, (160, 320), SMALL, ADD),
    (NORM, (320, 320), LARGE, BIASED),
    (NORM, (192, 384), SMALL, ADD),
    (NORM, (128, 256), SMALL, {}),
    (NORM_PAD, (160, 160), SMALL, {"history_frames": 0}),
    (NORM_PAD, (160, 160), LARGE, {"history_frames": 1, **ADD}),
    (NORM_PAD, (160, 160), TALL, {"history_frames": 2, **BIASED}),
    (NORM_PAD, (320, 320), SMALL, {"history_frames": 2}),
    (NORM_PAD, (160, 320), TALL, {"history_frames": 0, **BIASED}),
    (BIAS_PAD, (160, 160), SMALL, ADD),
    (BIAS_PAD, (160, 160), TALL, BIASED),
    (BIAS_PAD, (320, 640), LARGE, BIASED),
    (BIAS_PAD, (640, 640), SMALL, ADD),
    (CAUSAL, (12, 160), SMALL, {"history_frames": 0}),
    (CAUSAL, (12, 160), LARGE, {"history_frames": 1}),
    (CAUSAL, (12, 160), TALL, {"history_frames": 2}),
]
PORTABLE = [
    (RAW, (160, 160), SMALL, {}),
    (RAW, (160, 320), LARGE, {}),
    (RAW, (640, 640), SMALL, {}),
    (RAW, (8, 8), TALL, {}),
    (RAW, (24, 40), SMALL, {}),
    (RAW, (40, 328), TALL, {}),
    (NORM, (160, 160), LARGE, BIASED),
    (NORM, (8, 8), SMALL, {}),
    (NORM, (24, 320), TALL, ADD),
    (NORM, (24, 200), SMALL, ADD),
    (NORM_PAD, (160, 320), SMALL, {"history_frames": 1, **ADD}),
    (NORM_PAD, (24, 40), TALL, {"history_frames": 2}),
    (NORM_PAD, (160, 160), LARGE, {"history_frames": 0, **BIASED}),
    (BIAS_PAD, (160, 160), TALL, BIASED),
    (BIAS_PAD, (8, 24), SMALL, ADD),
    (CAUSAL, (12, 160), SMALL, {"history_frames": 0}),
    (CAUSAL, (12, 160), TALL, {"history_frames": 2}),
    (CAUSAL, (12, 160), LARGE, {"history_frames": 1}),
    (NORM_ONLY, (160, 160), SMALL, {}),
    (NORM_ONLY, (160, 160), SMALL, {"history_frames": 2, "has_input_bias": True, **BIASED}),
    (NORM_ONLY, (320, 320), SMALL, {"history_frames": 1, **ADD}),
    (NORM_ONLY, (640, 640), SMALL, {"residual": "save_input"}),
    (NORM_ONLY, (640, 640), SMALL, {"has_input_bias": True, "residual": "save_input"}),
    *((NORM_ONLY, (c, c), SMALL, {"history_frames": 1, **BIASED}) for c in (8, 24, 96, 1000, 2048)),
]
ROWS = [
    pytest.param(engine, *row, id=f"{engine}-{row[0]}-{row[1][0]}to{row[1][1]}-{row[2][2]}-{i}")
    for engine, rows in (("hopper", HOPPER), ("portable", PORTABLE))
    if engine in ENGINES
    for i, row in enumerate(rows)
]


@pytest.mark.parametrize(("engine", "kind", "channels", "tile_sites", "options"), ROWS)
def test_odd_sizes(engine, kind, channels, tile_sites, options):
    plan = compiled_plan(kind, engine, channels, tile_sites, **options)
    assert plan._stages[-1].engine == engine
    for what, is_exact, problem in odd_problems(kind, channels, **options):
        check(problem, plan, is_exact=is_exact, what=what)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("kind", "tile_sites"), [(RAW, TALL), (NORM_PAD, LARGE)])
def test_many_tiles(engine, kind, tile_sites):
    """Some waves of a persistent grid, ragged at both edges."""
    plan = compiled_plan(kind, engine, (160, 160), tile_sites)
    for sites in ((1, 7, 75, 155), (2, 5, 41, 113)):
        for data in ("integers", "normal"):
            problem = make_problem(kind, sites, (160, 160), device=CUDA, data=data)
            check(problem, plan, is_exact=data == "integers", what=f"{data} {sites}")


@pytest.mark.parametrize("channels", [(160, 160), (24, 40)])
def test_against_torch(channels):
    """An oracle that shares nothing with the reference."""
    x = torch.randn(2, 6, 21, 30, channels[0], device=CUDA).to(torch.bfloat16)
    weight = torch.randn(channels[1], channels[0], 3, 3, 3, device=CUDA)
    weight = (weight / math.sqrt(27 * channels[0])).to(torch.bfloat16)
    expected = F.conv3d(x.permute(0, 4, 1, 2, 3).double(), weight.double())
    output = ops.conv3d_raw(x, pack_conv3d_weight(weight))
    torch.testing.assert_close(
        output.double(), expected.permute(0, 2, 3, 4, 1), atol=ATOL, rtol=RTOL
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [RAW, NORM_PAD])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_inputs_stay_in_the_pixels_that_see_them(engine, kind, bad):
    channels = (160, 160)
    options = {"residual": "add"} if kind == NORM_PAD else {}
    clean = make_problem(kind, (1, 4, 20, 30), channels, device=CUDA, **options)
    spoilt = clean.clone()
    spoilt["input"][0, 3, 9, 17, 5] = bad
    plan = compiled_plan(kind, engine, channels, SMALL, **options)
    clean.execute(plan)
    spoilt.execute(plan)
    expected = spoilt.expected()
    name = "output" if kind == RAW else "residual_output"
    sees = torch.zeros(1, 4, 20, 30, dtype=torch.bool, device=CUDA)
    sees[:, 1:4, 7:10, 15:18] = True
    assert torch.equal(spoilt[name][~sees], clean[name][~sees])
    assert torch.equal(spoilt[name].isnan(), expected[name].isnan())
    assert torch.equal(spoilt[name].isinf(), expected[name].isinf())
    if kind == NORM_PAD:
        inner, other = spoilt["padded_output"][:, 2:, 1:-1, 1:-1], clean["padded_output"]
        assert torch.equal(inner[~sees], other[:, 2:, 1:-1, 1:-1][~sees])
        assert torch.equal(inner.isnan(), expected["padded_output"][:, 2:, 1:-1, 1:-1].isnan())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_norm_alone_keeps_a_bad_row_to_itself(bad):
    clean = make_problem(NORM_ONLY, (1, 2, 9, 13), (160, 160), device=CUDA)
    spoilt = clean.clone()
    spoilt["input"][0, 1, 4, 5, 7] = bad
    plan = compiled_plan(NORM_ONLY, "portable")
    clean.execute(plan)
    spoilt.execute(plan)
    same = torch.ones(1, 4, 11, 15, dtype=torch.bool, device=CUDA)
    same[0, 3, 5, 6] = False
    assert torch.equal(spoilt["padded_output"][same], clean["padded_output"][same])
    row, expected = spoilt["padded_output"][0, 3, 5, 6], spoilt.expected()["padded_output"]
    assert torch.equal(row.isnan(), expected[0, 3, 5, 6].isnan())
    if math.isinf(bad):
        assert not row[:7].any()
        assert not row[8:].any()
