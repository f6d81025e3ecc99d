# SPDX-License-Identifier: Apache-2.0
"""The block's reference against the FP64 oracle and against Hugging Face's Qwen3NextAttention."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import GatedAttentionGeometry, qkvg_from_hf
from cudnn_blocks.reference.gated_attention import gated_attention
from tests.helpers.gated_attention_problem import DTYPES, READ, SMALL, assert_close, make_problem

SIZES = {"d_model": 128, "h_q": 4, "h_kv": 2, "d_head": 64, "rope_dim": 16}


def geometry(**changes) -> GatedAttentionGeometry:
    return GatedAttentionGeometry(**{**SIZES, **changes})


def reference(problem):
    operands = [problem.operands[name] for name in READ]
    return gated_attention(
        *operands, problem.geometry, seq_lens=problem.operands["seq_lens"], **problem.knobs
    )


@pytest.mark.parametrize("fuse_norm_rope", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": False},
        {"causal_bottom_right": True},
        {"window_left": 3},
        {"window_left": 2, "window_right": 4},
        {"is_causal": False, "window_left": 0},
        {"qk_norm": False},
        {"rope_dim": 0},
        {"rope_dim": 64, "attn_scale": 0.3},
        {"h_q": 6, "h_kv": 1},
        {"qk_norm_eps": 0.5},
    ],
    ids=str,
)
def test_against_the_oracle(changes, dtype, fuse_norm_rope):
    one = geometry(**changes)
    problem = make_problem(
        one, 3, 11, dtype=dtype, seq_lens=[0, 4, 11], fuse_norm_rope=fuse_norm_rope
    )
    (out, lse), expected = reference(problem), problem.expected()
    assert out.dtype == dtype
    assert_close(out, expected.out, "out")
    dead = expected.lse == -torch.inf
    assert torch.equal(lse == -torch.inf, dead)
    torch.testing.assert_close(
        lse[~dead].double(), expected.lse[~dead], atol=16 * torch.finfo(dtype).eps, rtol=0
    )
    assert bool((out[dead.all(1)] == 0).all())


def test_rounding_where_the_page_has_it():
    """Fused norm + RoPE rounds Q and K once, unfused twice: not the same bits, and both near."""
    unfused = make_problem(SMALL, 2, 40)
    fused = unfused.with_knobs(fuse_norm_rope=True)
    a, b = reference(unfused)[0], reference(fused)[0]
    assert not torch.equal(a, b)
    assert_close(a, b, "out")


@pytest.fixture(scope="module")
def hf():
    """A small Qwen3NextAttention, its rotary embedding, and its weights' geometry."""
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    config = modeling.Qwen3NextConfig(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        rms_norm_eps=1e-6,
        attention_bias=False,
    )
    config._attn_implementation = "sdpa"
    attention = modeling.Qwen3NextAttention(config, layer_idx=0).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            if parameter.dim() == 2:
                parameter.mul_(parameter.shape[1] ** -0.5)
            else:  # 1 + w is exact in BF16
                parameter.copy_((parameter * 20).round().clamp(-64, 64) / 128)
    rotary = modeling.Qwen3NextRotaryEmbedding(config)
    cos, _ = rotary(torch.zeros(1, 1, 256), torch.zeros(1, 1, dtype=torch.int64))
    one = GatedAttentionGeometry(256, 4, 2, 128, rope_dim=cos.shape[-1])
    return attention, rotary, one


@pytest.mark.parametrize("fuse_norm_rope", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_against_hugging_face(hf, dtype, fuse_norm_rope):
    attention, rotary, one = hf
    assert one.rope_dim == 32
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    weights = {name: getattr(attention, name).weight.to(dtype) for name in names}
    w_o = weights.pop("o_proj")
    for name, weight in weights.items():
        getattr(attention, name).weight.copy_(weight)  # what they are in the activation dtype
    attention.o_proj.weight.copy_(w_o)
    packed = qkvg_from_hf(**weights, geometry=one)
    generator = torch.Generator().manual_seed(6)
    h = torch.randn(2, 37, one.d_model, generator=generator).to(dtype)
    cos, sin = rotary(h, torch.arange(37).expand(2, -1))
    expected, _ = attention(h.float(), (cos.float(), sin.float()), None)
    out, _ = gated_attention(h, *packed, cos, sin, w_o, one, fuse_norm_rope=fuse_norm_rope)
    assert_close(out, expected, "out")
