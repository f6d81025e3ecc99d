# SPDX-License-Identifier: Apache-2.0
"""The attention reference against FP64, torch's own, and a flash-style emulation."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from cudnn_blocks.reference import attention
from cudnn_blocks.reference.attention import AttentionMask, sdpa
from tests.helpers.tensors import assert_same_bits
from tests.oracles.sdpa_reference import exact, lazy_online, visible_keys

torch.set_num_threads(1)  # tensors are small: threads would only wait for one another

MASKS = {
    "full": {"is_causal": False},
    "full-left": {"is_causal": False, "window_left": 3},
    "causal": {},
    "bottom-right": {"causal_bottom_right": True},
    "left": {"window_left": 2},
    "left-0": {"window_left": 0},
    "right": {"window_right": 2},
    "band": {"causal_bottom_right": True, "window_left": 4, "window_right": 1},
    "wide": {"window_left": 50, "window_right": 60},
}
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def operands(b=2, s=7, sk=9, h_q=2, h_kv=1, d=16, dtype=torch.bfloat16):
    q, k, v = torch.randn(b, s, h_q, d), torch.randn(b, sk, h_kv, d), torch.randn(b, sk, h_kv, d)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def run(q, k, v, scale=0.25, gate=None, seq_lens=None, **mask):
    o = torch.full_like(q, math.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    lens = None if seq_lens is None else torch.tensor(seq_lens, dtype=torch.int32)
    sdpa(q, k, v, o, gate, lse, lens, scale, AttentionMask(**mask))
    return o, lse


def assert_near(o, expected, v, factor=2.0):
    """Within ``factor`` roundings of the largest value that a row could hold."""
    bound = factor * EPS[o.dtype] * v.float().abs().max().item()
    assert (o.double() - expected).abs().max().item() <= bound


@pytest.mark.parametrize("seq_lens", [None, [0, 5], [-3, 90]])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_against_fp64_row_by_row(mask, seq_lens):
    for dtype, (s, sk) in itertools.product(EPS, ((7, 9), (9, 7), (1, 5), (5, 1))):
        q, k, v = operands(s=s, sk=sk, dtype=dtype)
        o, lse = run(q, k, v, seq_lens=seq_lens, **mask)
        wanted, wanted_lse = exact(q, k, v, 0.25, seq_lens, **mask)
        assert_near(o, wanted, v)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-5)
        dead = o[(lse == -math.inf).transpose(1, 2)]
        assert torch.equal(dead, torch.zeros_like(dead))


@pytest.mark.parametrize(("h_q", "h_kv"), [(1, 1), (3, 1), (6, 2), (16, 2), (5, 5)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_against_torch(h_q, h_kv, is_causal):
    q, k, v = operands(s=33, sk=33, h_q=h_q, h_kv=h_kv, d=64)
    o, _ = run(q, k, v, 0.125, is_causal=is_causal)
    heads = [x.double().transpose(1, 2) for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*heads, is_causal=is_causal, enable_gqa=True)
    assert_near(o, wanted.transpose(1, 2), v)


SCORES = {
    "flat": lambda keys: torch.zeros_like(keys),
    "falling": lambda keys: -0.9 * keys,
    "rising": lambda keys: 0.9 * keys,
    "steps of the threshold": lambda keys: 8 * math.log(2) * (keys // 4),
    "one key far above": lambda keys: torch.where(keys == 5, 60.0, 0.0),
    "zigzag": lambda keys: 20.0 * (keys % 2) - keys,
    "far below zero": lambda keys: -1.6e5 - 0.0 * keys,
}


@pytest.mark.parametrize("block", [1, 3, 16, 64])
@pytest.mark.parametrize("profile", SCORES.values(), ids=SCORES)
def test_against_a_lazy_online_softmax(profile, block):
    """Adversarial scores: every way in which a lagging reference could lose a weight."""
    s = sk = 24
    d = 16
    keys = torch.arange(sk, dtype=torch.float32)
    q = torch.zeros(1, s, 1, d)
    q[..., 0] = 1.0
    q[..., 1:] = 0.05 * torch.randn(1, s, 1, d - 1)
    k = 0.05 * torch.randn(1, sk, 1, d)
    k[0, :, 0, 0] = profile(keys)
    v = torch.randn(1, sk, 1, d)
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    for name in ("full", "causal", "band"):
        mask = MASKS[name]
        o, lse = run(q, k, v, 1.0, **mask)
        visible = torch.zeros(s, sk, dtype=torch.bool)
        for row in range(s):
            visible[row, visible_keys(row, s, sk, **mask)] = True
        emulated, emulated_lse = lazy_online(
            q[0, :, 0], k[0, :, 0], v[0, :, 0], 1.0, visible, block
        )
        assert_near(emulated, o[0, :, 0].double(), v, factor=3.0)
        torch.testing.assert_close(lse[0, 0], emulated_lse, rtol=1e-6, atol=2e-5)


def test_weights_are_rounded_for_the_product_and_not_in_the_sum():
    """Weights 1 and 1 - 2**-9, which BF16 rounds to 1: where it meets V, and only there."""
    weight, small = 1 - 2.0**-9, 0.0185546875
    q, k, v = (torch.zeros(1, n, 1, 16, dtype=torch.bfloat16) for n in (1, 2, 2))
    q[..., 0] = k[0, 1, 0, 0] = 1.0
    v[0, :, 0, 0] = torch.tensor([small, 1.0])
    o, lse = run(q, k, v, math.log(weight), is_causal=False)
    rounded, plain = (torch.tensor((small + w) / (1 + weight)).bfloat16() for w in (1.0, weight))
    assert rounded != plain
    assert o[0, 0, 0, 0] == rounded
    assert math.isclose(lse.item(), math.log(1 + weight), rel_tol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_tail_never_leaks(mask, bad):
    """S14: keys and values past the length may hold anything."""
    q, k, v = operands()
    clean = run(q, k, v, seq_lens=[3, 9], **mask)
    k[0, 3:], v[0, 3:] = bad, bad
    for got, wanted in zip(run(q, k, v, seq_lens=[3, 9], **mask), clean, strict=True):
        assert_same_bits(got, wanted, f"{mask}")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_key_reaches_the_rows_that_see_it_alone(bad):
    q, k, v = operands(b=1, s=8, sk=8)
    clean, clean_lse = run(q, k, v, window_left=2)
    v[0, 4, 0, 3] = bad
    o, lse = run(q, k, v, window_left=2)
    reached = ~torch.isfinite(o)
    assert reached[0, 4:7, :2, 3].all()
    assert reached.sum() == 6
    assert torch.equal(lse, clean_lse)
    assert_same_bits(o[~reached], clean[~reached], "other elements")


def test_a_row_without_a_key():
    """S15, S16: exact zeros by select, before and after a gate; LSE -inf."""
    q, k, v = operands(b=3, s=4, sk=4)
    q[:], k[:] = 300.0, -300.0
    gate = torch.full_like(q, 100.0)
    for one in (None, gate):
        o, lse = run(q, k, v, seq_lens=[0, 4, 0], gate=one)
        for b in (0, 2):
            assert torch.equal(o[b], torch.zeros_like(o[b]))
            assert (lse[b] == -math.inf).all()
        assert torch.isfinite(o[1]).all()
        assert torch.isfinite(lse[1]).all()


def test_extreme_logits():
    """S16: every visible logit is -1.6e5, and the rows are the means of the values they see."""
    q = torch.full((1, 4, 1, 64), 50.0, dtype=torch.bfloat16)
    k = -q
    v = torch.arange(4.0).view(1, 4, 1, 1).expand(1, 4, 1, 64).to(torch.bfloat16)
    o, lse = run(q, k, v, 1.0)
    assert o[0, :, 0, 0].tolist() == [0.0, 0.5, 1.0, 1.5]
    torch.testing.assert_close(lse[0, 0], -1.6e5 + torch.log(torch.arange(1.0, 5.0)))


@pytest.mark.parametrize("window", [0, 1, 2, 6, 7])
def test_a_window_counts_the_keys_left_of_the_diagonal(window):
    """S17: row i sees max(0, i - window) to i."""
    q = torch.zeros(1, 6, 1, 16, dtype=torch.bfloat16)
    v = torch.zeros(1, 6, 1, 16, dtype=torch.bfloat16)
    v[0, torch.arange(6), 0, torch.arange(6)] = 1.0
    o, _ = run(q, q, v, 1.0, window_left=window)
    for i in range(6):
        seen = (o[0, i, 0] > 0).nonzero().flatten().tolist()
        assert seen == list(range(max(0, i - window), i + 1))


def test_the_gate_follows_the_rounding():
    q, k, v = operands()
    gate = torch.randn(q.shape).to(q.dtype)
    o, lse = run(q, k, v)
    gated, gated_lse = run(q, k, v, gate=gate)
    wanted = (o.float() * torch.sigmoid(gate.float())).to(q.dtype)
    assert_same_bits(gated, wanted, "gated")
    assert_same_bits(gated_lse, lse, "lse")


def test_scores_are_held_in_pieces(monkeypatch):
    q, k, v = operands(s=50, sk=60)
    whole = run(q, k, v, causal_bottom_right=True)
    held = []
    product = torch.matmul

    def watched(a, b):
        result = product(a, b)
        held.append(result.numel())
        return result

    monkeypatch.setattr(attention, "MAX_SCORES", 2 * 60 * 7)
    monkeypatch.setattr(torch, "matmul", watched)
    pieces = run(q, k, v, causal_bottom_right=True)
    assert max(held) <= 2 * 60 * 7
    for got, wanted in zip(pieces, whole, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2.0**-7, atol=1e-6)


def test_views_of_a_slab():
    slab = torch.randn(2, 5, 3 * 4 * 16).to(torch.bfloat16)
    q, k, v = (x.unflatten(2, (4, 16)) for x in slab.split(64, dim=2))
    o, lse = run(q, k, v)
    copies = run(q.contiguous(), k.contiguous(), v.contiguous())
    assert_same_bits(o, copies[0], "o")
    assert_same_bits(lse, copies[1], "lse")
