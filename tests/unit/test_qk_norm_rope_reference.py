# SPDX-License-Identifier: Apache-2.0
"""The reference of QK norm and RoPE against formulas that share no code with it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from cudnn_blocks.reference.qk_norm_rope import norm_and_rotate, qk_norm_rope
from tests.helpers.pointwise_problem import DTYPES, make_qk
from tests.helpers.tensors import assert_same_bits, random_bits

dtypes = pytest.mark.parametrize("dtype", DTYPES)


def by_fp64_loop(x, weight, cos, sin, eps):
    """One head, channel by channel, in Python floats."""
    values, d = x.double().tolist(), x.shape[0]
    if weight is not None:
        root = math.sqrt(sum(v * v for v in values) / d + eps)
        values = [v / root * w for v, w in zip(values, weight.double().tolist(), strict=True)]
    rope_dim = 0 if cos is None else cos.shape[0]
    half, turned = rope_dim // 2, list(values)
    for i in range(rope_dim):
        partner = -values[i + half] if i < half else values[i - half]
        turned[i] = values[i] * cos[i].item() + partner * sin[i].item()
    return torch.tensor(turned, dtype=torch.float64)


@dtypes
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("rope_dim", [0, 2, 6, 16, 24])
def test_against_an_fp64_loop(dtype, has_norm, rope_dim):
    problem = make_qk((2, 3, 2, 1, 24), rope_dim, dtype=dtype, has_norm=has_norm)
    done = problem.expected()
    for name, weight in (("q", "w_q_norm"), ("k", "w_k_norm")):
        x, y = problem[name], done[name]
        for b, s, h in torch.cartesian_prod(*map(torch.arange, x.shape[:3])).tolist():
            tables = [problem.operands[t] for t in ("cos", "sin")]
            rows = [None if t is None else t[b, s] for t in tables]
            exact = by_fp64_loop(x[b, s, h], problem.operands[weight], *rows, problem.eps)
            assert_rounded_once(y[b, s, h], exact)


def assert_rounded_once(actual, exact):
    """The stored value is a neighbour of the exact one, and nearest but for FP32's own error."""
    dtype = actual.dtype
    up = torch.nextafter(actual, torch.full_like(actual, math.inf)).double()
    down = torch.nextafter(actual, torch.full_like(actual, -math.inf)).double()
    slack = 1e-5 * exact.abs().clamp_min(1.0)
    half_step = torch.maximum(up - actual.double(), actual.double() - down) / 2
    wrong = (actual.double() - exact).abs() > half_step + slack
    assert not wrong.any(), f"{dtype}: {actual[wrong].tolist()} for {exact[wrong].tolist()}"


def test_the_norm_is_torchs_rms_norm():
    problem = make_qk((2, 3, 4, 2, 64), 0)
    for name, weight in (("q", "w_q_norm"), ("k", "w_k_norm")):
        x, w = problem[name].float(), problem[weight]
        ours = norm_and_rotate(x, w, None, None, 1e-5)
        torch.testing.assert_close(ours, F.rms_norm(x, (64,), w.float(), 1e-5))


def test_the_rotation_is_a_complex_product():
    """Duplicated halves: channels i and i + R/2 are one complex number, turned by one angle."""
    x = torch.randn(2, 3, 4, 32)
    angles = torch.rand(2, 3, 8) * 6.3
    cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
    turn = torch.polar(torch.ones(1), angles)[:, :, None]
    turned = torch.complex(x[..., :8], x[..., 8:16]) * turn
    expected = torch.cat((turned.real, turned.imag, x[..., 16:]), -1)
    torch.testing.assert_close(norm_and_rotate(x, None, cos, sin, 1e-6), expected)


def test_channels_pair_across_the_halves_of_rope_dim():
    """S18: 90 degrees for pair 0. Interleaved pairs would give [0, 1, 0, 0]."""
    q = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    q[..., 0] = 1
    cos = torch.tensor([0.0, 1, 0, 1], dtype=q.dtype).view(1, 1, 4)
    sin = torch.tensor([1.0, 0, 1, 0], dtype=q.dtype).view(1, 1, 4)
    qk_norm_rope(q, q.clone(), None, None, cos, sin, 1e-6)
    assert q.flatten().tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


@dtypes
def test_every_half_of_the_tables_is_used(dtype):
    """The halves need not be equal: each output channel has a row entry of its own."""
    q = torch.zeros(1, 1, 1, 8, dtype=dtype)
    q[..., :4] = torch.tensor([1.0, 0, 2, 0])
    cos = torch.tensor([2.0, 1, 3, 1], dtype=dtype).view(1, 1, 4)
    sin = torch.tensor([5.0, 0, 7, 0], dtype=dtype).view(1, 1, 4)
    qk_norm_rope(q, q.clone(), None, None, cos, sin, 1e-6)
    assert q.flatten()[:4].tolist() == [1 * 2 - 2 * 5, 0, 2 * 3 + 1 * 7, 0]


@dtypes
def test_without_a_norm_other_channels_keep_their_bits(dtype):
    """NaN payloads included."""
    problem = make_qk((2, 3, 4, 2, 64), 16, dtype=dtype, has_norm=False)
    for name in ("q", "k"):
        x = problem[name]
        x.copy_(random_bits(tuple(x.shape), dtype, "cpu"))
    before = problem.clone()
    done = problem.run()
    for name in ("q", "k"):
        assert_same_bits(done[name][..., 16:], before[name][..., 16:], name)


@dtypes
@pytest.mark.parametrize("rope_dim", [2, 6, 16, 64])
def test_channels_past_rope_dim_are_the_normed_ones(dtype, rope_dim):
    """S18: bit for bit, whatever rope_dim is."""
    problem = make_qk(rope_dim=rope_dim, dtype=dtype)
    turned, plain = problem.expected(), problem.with_(cos=None, sin=None).expected()
    for name in ("q", "k"):
        assert_same_bits(turned[name][..., rope_dim:], plain[name][..., rope_dim:], name)
        assert not torch.equal(turned[name][..., :rope_dim], plain[name][..., :rope_dim])


def test_the_intermediate_is_not_rounded():
    """A norm that were rounded before the rotation would lose the small difference here."""
    q = torch.full((1, 1, 1, 8), 1.0, dtype=torch.bfloat16)
    q[..., 1] = 1.0078125
    cos = sin = torch.ones(1, 1, 2, dtype=q.dtype)
    ones = torch.ones(8, dtype=q.dtype)
    qk_norm_rope(q, q.clone(), ones, ones, cos, sin, 1e-6)
    scale = 1 / math.sqrt((7 + 1.0078125**2) / 8 + 1e-6)
    assert q[0, 0, 0, 0].item() == torch.tensor((1 - 1.0078125) * scale).to(q.dtype).item()


def test_a_bad_value_stays_in_its_head():
    problem = make_qk((2, 3, 4, 2, 64), 16)
    clean = problem.expected()
    for value in (math.nan, math.inf):
        spoilt = problem.clone()
        spoilt["q"][1, 2, 3, 5] = value
        done = spoilt.expected()
        assert not done["q"][1, 2, 3].isfinite().all()
        done["q"][1, 2, 3] = clean["q"][1, 2, 3]
        for name in ("q", "k"):
            assert_same_bits(done[name], clean[name], name)


def test_eps_counts():
    problem = make_qk((1, 2, 2, 1, 64), 0)
    tiny = problem.with_(q=(problem["q"] * 1e-4).clone())
    results = [replace(tiny, eps=eps).expected()["q"] for eps in (1e-12, 1e-6, 1e-2)]
    none, small, large = (x.float().square().mean().sqrt().item() for x in results)
    assert none > small > 10 * large
