# SPDX-License-Identifier: Apache-2.0
"""The reference of the projections against oracles that share nothing with it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from cudnn_blocks import GatedAttentionGeometry
from cudnn_blocks.reference import gemm as reference
from cudnn_blocks.reference.gated_attention_weights import build_fused_qkvg_weight
from tests.helpers.gemm_problem import DTYPES, ULP_OF_ONE, make_gemm, make_projection
from tests.helpers.tensors import assert_same_bits

SMALL = GatedAttentionGeometry(d_model=40, h_q=4, h_kv=2, d_head=64, rope_dim=12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_are_summed_exactly_and_rounded_once(dtype):
    """Sums past the 8 or 11 bits of the dtype show the one rounding, to nearest even."""
    problem = make_gemm((2, 7, 24, 1000), dtype=dtype)
    problem["x"].mul_(7)
    problem["w"].mul_(9)
    exact = problem["x"].double() @ problem["w"].double().t()
    assert (exact != exact.to(dtype).double()).any()
    assert_same_bits(problem.expected(), exact.to(dtype), "y")


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_linear_in_fp64(dtype):
    problem = make_gemm((3, 11, 40, 264), dtype=dtype, data="normal")
    exact = F.linear(problem["x"].double(), problem["w"].double())
    ulp = ULP_OF_ONE[dtype]
    torch.testing.assert_close(problem.expected().double(), exact, rtol=ulp / 2, atol=1e-6)


def head_by_head(problem):
    """The contract's formulas in Python floats, one element at a time."""
    one, ops = problem.geometry, problem.operands
    half, rope_dim, d = one.rope_dim // 2, one.rope_dim, one.d_head
    h, w, proj = ops["h"].double(), ops["w_qkvg"].double(), ops["proj"]
    out = torch.empty(proj.shape, dtype=torch.float64)
    first_k = one.qkvg_offsets[2] // d
    for b in range(h.shape[0]):
        for s in range(h.shape[1]):
            row = (w @ h[b, s]).tolist()
            for head in range(len(row) // d):
                x = row[head * d : head * d + d]
                is_k = first_k <= head < first_k + one.h_kv
                if head < one.h_q or is_k:
                    if one.qk_norm:
                        scale = 1 / math.sqrt(sum(v * v for v in x) / d + one.qk_norm_eps)
                        weight = ops["w_k_norm" if is_k else "w_q_norm"].tolist()
                        x = [v * scale * weight[i] for i, v in enumerate(x)]
                    if rope_dim:
                        cos, sin = ops["cos"][b, s].tolist(), ops["sin"][b, s].tolist()
                        x = [
                            x[i] * cos[i] + (x[i - half] if i >= half else -x[i + half]) * sin[i]
                            if i < rope_dim
                            else x[i]
                            for i in range(d)
                        ]
                out[b, s, head * d : head * d + d] = torch.tensor(x, dtype=torch.float64)
    return out


@pytest.mark.parametrize(("rope_dim", "qk_norm"), [(12, True), (64, True), (0, True), (6, False)])
def test_norm_and_rope_head_by_head(rope_dim, qk_norm):
    sizes = {"rope_dim": rope_dim, "qk_norm": qk_norm, "qk_norm_eps": 1e-2}
    geometry = GatedAttentionGeometry(d_model=24, h_q=2, h_kv=1, d_head=64, **sizes)
    problem = make_projection(geometry, (2, 3), data="normal")
    exact = head_by_head(problem)
    ulp = ULP_OF_ONE[torch.bfloat16]
    torch.testing.assert_close(problem.expected().double(), exact, rtol=ulp / 2, atol=1e-5)


def test_without_norm_the_channels_past_rope_are_those_of_the_product():
    geometry = GatedAttentionGeometry(
        d_model=40, h_q=2, h_kv=1, d_head=64, rope_dim=12, qk_norm=False
    )
    problem = make_projection(geometry)
    plain = torch.empty_like(problem.result)
    reference.gemm(problem["h"], problem["w_qkvg"], plain)
    fused, plain = (t.unflatten(-1, (-1, 64)) for t in (problem.expected(), plain))
    assert_same_bits(fused[..., 12:], plain[..., 12:], "past rope_dim")
    assert not torch.equal(fused[..., :2, :12], plain[..., :2, :12])


def test_the_bands_are_those_of_the_weight_helper():
    """S20: a gate of one head, driven by one row of the weight, moves nothing else."""
    one = SMALL
    q, gate, k, v = (torch.zeros(width, one.d_model) for width in one.qkvg_block_widths)
    gate[64:128] = 1.0
    w = build_fused_qkvg_weight(torch.cat((q, gate)), k, v, one, q_gate_layout="flat")
    problem = make_projection(one, fuse_norm_rope=False).with_(w_qkvg=w.bfloat16())
    slab = problem.expected()
    assert slab[..., 256 + 64 : 256 + 128].any()
    slab[..., 256 + 64 : 256 + 128] = 0
    assert not slab.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_stay_in_their_row_and_head(bad):
    clean = make_projection(SMALL, data="normal")
    spoilt = clean.clone()
    spoilt["h"][1, 3, 7] = bad
    spoilt["w_qkvg"][70, 5] = bad
    expected, before = spoilt.expected(), clean.expected()
    keep = torch.ones(expected.shape, dtype=torch.bool)
    keep[1, 3] = False
    keep[..., 64:128] = False
    assert_same_bits(expected[keep], before[keep], "elsewhere")
    assert not expected[1, 3].isfinite().all()
