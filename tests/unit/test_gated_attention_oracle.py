# SPDX-License-Identifier: Apache-2.0
"""The block's FP64 oracle against torch, closed forms and itself."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from cudnn_blocks import GatedAttentionGeometry
from tests.helpers.gated_attention_problem import make_problem
from tests.oracles import gated_attention_reference as oracle

SIZES = {"d_model": 64, "h_q": 4, "h_kv": 2, "d_head": 32, "rope_dim": 8}


def geometry(**changes) -> GatedAttentionGeometry:
    return GatedAttentionGeometry(**{**SIZES, **changes})


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_is_that_of_torch(is_causal):
    expected = make_problem(geometry(is_causal=is_causal), 2, 9).expected()
    torch_o = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (expected.q, expected.k, expected.v)),
        is_causal=is_causal,
        enable_gqa=True,
    ).transpose(1, 2)
    torch.testing.assert_close(expected.o, torch_o, atol=0, rtol=2.0**-8)


@pytest.mark.parametrize(
    ("changes", "length", "rows"),
    [
        ({}, 4, [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),
        ({}, 2, [[0], [0, 1], [0, 1], [0, 1]]),
        ({}, 0, [[], [], [], []]),
        ({"is_causal": False}, 3, [[0, 1, 2]] * 4),
        ({"window_left": 0}, 4, [[0], [1], [2], [3]]),
        ({"window_left": 1}, 4, [[0], [0, 1], [1, 2], [2, 3]]),
        ({"window_left": 1}, 2, [[0], [0, 1], [1], []]),
        ({"window_right": 1}, 4, [[0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]),
        ({"window_right": 0}, 4, [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),
        ({"causal_bottom_right": True}, 4, [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),
        ({"causal_bottom_right": True}, 2, [[], [], [0], [0, 1]]),
        ({"causal_bottom_right": True, "window_left": 0}, 3, [[], [0], [1], [2]]),
        (
            {"is_causal": False, "window_left": 1},
            4,
            [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3], [2, 3]],
        ),
    ],
)
def test_visible_keys_by_hand(changes, length, rows):
    one = geometry(**changes)
    assert [oracle.visible_keys(one, row, 4, length) for row in range(4)] == rows


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    one = geometry(qk_norm=False)
    angles = torch.arange(16.0)[:, None] * torch.tensor([1.0, 0.3, 0.05, 0.002]).repeat(2)
    cos, sin = angles.cos()[None], angles.sin()[None]
    x = torch.randn(1, 1, 1, 32, dtype=torch.float64).expand(1, 16, 1, 32)
    y = torch.randn(1, 1, 1, 32, dtype=torch.float64).expand(1, 16, 1, 32)
    a = oracle.norm_and_rotate(x, None, cos, sin, one)[0, :, 0]
    b = oracle.norm_and_rotate(y, None, cos, sin, one)[0, :, 0]
    torch.testing.assert_close(a.norm(dim=1), x[0, :, 0].norm(dim=1), atol=1e-6, rtol=0)
    assert torch.equal(a[:, 8:], x[0, :, 0, 8:])
    for distance in (0, 1, 5):
        dots = torch.stack([a[i] @ b[i + distance] for i in range(16 - distance)])
        torch.testing.assert_close(dots, dots[:1].expand_as(dots), atol=1e-5, rtol=0)


def test_a_quarter_turn_pairs_a_channel_with_the_one_half_a_rope_away():
    """S18: not with its neighbour."""
    one = geometry(rope_dim=4, qk_norm=False)
    x = torch.zeros(1, 1, 1, 32, dtype=torch.float64)
    x[..., 0] = 1
    cos, sin = torch.tensor([0.0, 1, 0, 1]), torch.tensor([1.0, 0, 1, 0])
    y = oracle.norm_and_rotate(x, None, cos[None, None], sin[None, None], one)
    assert y[0, 0, 0, :5].tolist() == [0, 0, 1, 0, 0]


def test_norm_is_that_of_torch():
    one = geometry(rope_dim=0)
    x, weight = torch.randn(2, 3, 4, 32, dtype=torch.float64), torch.rand(32) + 0.5
    expected = F.rms_norm(x, (32,), weight.double(), eps=one.qk_norm_eps)
    actual = oracle.norm_and_rotate(x, weight, None, None, one)
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_rows_without_a_key_are_zero_and_lse_says_so():
    problem = make_problem(geometry(causal_bottom_right=True), 3, 5, seq_lens=[0, 3, 5])
    expected = problem.expected()
    for entry, dead in ((0, 5), (1, 2), (2, 0)):
        for tensor in (expected.o, expected.gated, expected.out):
            assert bool((tensor[entry, :dead] == 0).all())
        assert bool((expected.lse[entry, :, :dead] == -math.inf).all())
        assert bool(expected.lse[entry, :, dead:].isfinite().all())


def test_the_gate_of_a_head_scales_that_head():
    """S20: gate rows of head 0 at -100 and of head 1 at 0."""
    one = geometry(h_q=2, h_kv=2, d_head=32)
    problem = make_problem(one, 1, 4)
    w = problem.operands["w_qkvg"].clone()
    w[64:128] = 0
    h = problem.operands["h"].clone()
    h[..., 0] = 1
    w[64:96, 0] = -100
    expected = problem.with_(w_qkvg=w, h=h).expected()
    assert bool((expected.gated[:, :, 0].abs() < 1e-30).all())
    torch.testing.assert_close(expected.gated[:, :, 1], expected.o[:, :, 1] / 2, atol=0, rtol=2**-7)


@pytest.mark.parametrize("block", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_online_emulation_agrees_with_the_exact_softmax(block, dtype):
    """Blocks of any size, rows that see nothing, and scores that drown one another."""
    q, k, v = (torch.randn(48, 32).to(dtype) for _ in range(3))
    k[7] *= 40
    visible = torch.rand(48, 48) < 0.4
    visible[5] = False
    scale = 0.3
    o, lse = oracle.online_attention(q, k, v, scale, visible, block, dtype)
    scores = (q.double() @ k.double().T * scale).masked_fill(~visible, -math.inf)
    exact = torch.softmax(scores, 1).nan_to_num(0.0) @ v.double()
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    assert bool((o[5] == 0).all())
    assert lse[5] == -math.inf
    torch.testing.assert_close(o.double(), exact, atol=8 * step, rtol=2 * step)
    torch.testing.assert_close(lse.double(), torch.logsumexp(scores, 1), atol=1e-4, rtol=1e-5)
