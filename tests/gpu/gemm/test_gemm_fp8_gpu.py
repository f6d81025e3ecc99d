# SPDX-License-Identifier: Apache-2.0
"""Products of e4m3 codes on the GPU at hand, plain and as the projection of the FP8 block."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import ops
from cudnn_blocks.reference.gated_attention_precision import fp8_projection
from cudnn_blocks.stages.gemm.epilogues import NormRope
from cudnn_blocks.stages.gemm.stage import GemmModes, GemmStage
from cudnn_blocks.target import Target
from tests.helpers.gemm_gpu import CUDA, ENGINES, HAS_HOPPER
from tests.helpers.gemm_problem import pitched
from tests.helpers.pointwise_problem import make_tables

pytestmark = pytest.mark.gpu
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
KINDS = [(engine, False) for engine in ENGINES] + ([("hopper", True)] if HAS_HOPPER else [])
"""Engines, the Hopper one also with fast accumulation."""
TILE_ROWS = (16, 512, 4096, 32768)
"""Rows for which plans are made: each gets another tile."""


def codes(shape, low, high, pad=0):
    wide = torch.zeros(*shape[:-1], shape[-1] + pad, device=CUDA)
    wide[..., : shape[-1]] = torch.randint(low, high, shape, device=CUDA)
    return wide.to(E4M3)[..., : shape[-1]]


def make_stage(kind, n, k, rows, norm_rope=None, alpha=0.3):
    engine, is_fast = kind
    modes = GemmModes(n, k, "e4m3", norm_rope, fast_accumulation=is_fast)
    stage = GemmStage("gemm", modes, rows, Target.of_device(CUDA), engine, eps=1e-6, alpha=alpha)
    stage.check()
    stage.compile()
    return stage


def launch(stage, operands):
    stage.launch(operands, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", TILE_ROWS)
@pytest.mark.parametrize("shape", [(1, 300, 520, 208), (2, 77, 136, 48), (1, 1, 1288, 2048)])
def test_exact_sums_have_the_bits_of_the_reference(kind, rows, shape):
    b, s, n, k = shape
    x, w = codes((b, s, k), -4, 5, 16), codes((n, k), -2, 3, 32)
    y = pitched((b, s, n), 8, BF16, CUDA)
    launch(make_stage(kind, n, k, rows), (x, w, y))
    expected = ((x.double() @ w.double().t()).float() * 0.3).bfloat16()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_nan_codes_stay_in_their_rows_and_columns(kind):
    x, w = codes((1, 300, 256), -4, 5), codes((520, 256), -2, 3)
    y = torch.empty(1, 300, 520, dtype=BF16, device=CUDA)
    stage = make_stage(kind, 520, 256, 300)
    launch(stage, (x, w, y))
    clean = y.clone()
    x.view(torch.uint8)[0, 17, 5] = 0x7F
    w.view(torch.uint8)[13, 255] = 0xFF
    launch(stage, (x, w, y))
    is_nan = torch.zeros(300, 520, dtype=torch.bool, device=CUDA)
    is_nan[17] = is_nan[:, 13] = True
    assert y[0][is_nan].isnan().all()
    assert torch.equal(y[0][~is_nan], clean[0][~is_nan])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_long_sums_lose_little_where_they_are_promoted(kind):
    x, w = codes((1, 256, 16384), 1, 16), codes((256, 16384), 1, 16)
    y = torch.empty(1, 256, 256, dtype=BF16, device=CUDA)
    launch(make_stage(kind, 256, 16384, 256, alpha=1.0), (x, w, y))
    exact = x.double() @ w.double().t()
    # Sums of one sign lose the most. Of each product an accumulation without promotion drops what
    # is below 14 bits of the sum so far, which was 27 % of all on an H200.
    bound = 0.5 if kind == ("hopper", True) else 2.0**-8 + 2.0**-11
    lost = (exact - y.double()) / exact
    assert lost.max() <= bound
    assert lost.min() >= -(2.0**-8) - 2.0**-11


@pytest.mark.parametrize("fast", [False, True])
def test_random_sums_lose_what_their_accumulation_may(fast):
    """Of an element's sum of magnitudes, beside the rounding to BF16.

    An instruction aligns 32 products and the sum so far to the largest of them and drops what is
    below its 14 bits. So emulated, normal codes lose 2**-11.6 at worst over all of K = 4096 and
    2**-16.3 over 128 at a time; the bounds leave three times that and more.
    """
    x, w = (torch.randn(1, 256, 4096, device=CUDA).to(E4M3) for _ in range(2))
    y = ops.gemm(x, w[0], fast_accumulation=fast).double()
    exact = x.double() @ w[0].double().t()
    magnitudes = x.double().abs() @ w[0].double().abs().t()
    lost = (y - exact).abs() - exact.abs() * 2.0**-8
    assert (lost / magnitudes).max() <= (2.0**-10 if fast else 2.0**-14)


def test_exact_sums_have_the_same_bits_however_they_are_accumulated():
    x, w = codes((1, 300, 2048), -4, 5), codes((520, 2048), -2, 3)
    fast, promoted = (ops.gemm(x, w, alpha=0.3, fast_accumulation=one) for one in (True, False))
    assert torch.equal(fast, promoted)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("rows", [512, 32768])
@pytest.mark.parametrize(
    "norm_rope",
    [
        NormRope(256, 4, 1, 64, True),
        NormRope(256, 3, 1, 0, True),
        NormRope(128, 4, 2, 128, False),
        NormRope(64, 5, 1, 20, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [(1, 300), (2, 77)])
def test_projection_makes_the_codes_of_the_reference(kind, rows, norm_rope, tokens):
    d_head, k = norm_rope.d_head, 208
    heads = (norm_rope.h_q, norm_rope.h_kv, norm_rope.h_kv, norm_rope.h_q)
    x, w = codes((*tokens, k), -3, 4), codes((2 * sum(heads[:2]) * d_head, k), -2, 3)
    dtypes = (E4M3, E4M3, E4M3, BF16)
    shapes = [((*tokens, h, d_head), dtype) for h, dtype in zip(heads, dtypes, strict=True)]
    results, wanted = (
        [torch.zeros(shape, dtype=dtype, device=CUDA) for shape, dtype in shapes] for _ in range(2)
    )
    cos, sin = make_tables(tokens[0], tokens[1], norm_rope.rope_dim, BF16, False, CUDA)
    weights = [None, None]
    if norm_rope.has_norm:
        weights = [(1 + 0.3 * torch.randn(d_head, device=CUDA)).to(BF16) for _ in range(2)]
    stage = make_stage(kind, w.shape[0], k, rows, norm_rope, alpha=0.07)
    stage.scale_q, stage.scale_k, stage.scale_v = scales = (30.0, 50.0, 17.0)
    launch(stage, (x, w, *results, *weights, cos, sin))
    fp8_projection(x, w, *wanted, *weights, cos, sin, 1e-6, 0.07, *scales)
    q, k8, v, gate = zip(results, wanted, strict=True)
    assert torch.equal(v[0].view(torch.uint8), v[1].view(torch.uint8))
    assert torch.equal(*gate)
    for actual, expected in (q, k8):
        a, e = actual.float(), expected.float()
        assert (a != e).double().mean() < 2e-3  # roundings of the norm that fall the other way
        assert ((a - e).abs() <= e.abs() / 8 + 2.0**-9).all()
