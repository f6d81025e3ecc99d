# SPDX-License-Identifier: Apache-2.0
"""QK norm and RoPE on a GPU: numbers, bits that have to stay, strides, bad values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cudnn_blocks import ops
from cudnn_blocks.stages.kernel_cache import KERNELS
from tests.helpers.pointwise_problem import DTYPES, QkProblem, assert_close, make_qk
from tests.helpers.tensors import assert_same_bits, random_bits

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
BF16, FP16 = DTYPES
QWEN = (16, 2, 256)

GRID = [
    *(
        (heads, rope_dim, BF16, True)
        for heads, rope_dim in (((16, 2, 256), 64), ((32, 2, 256), 64))
    ),
    (QWEN, 64, FP16, True),
    (QWEN, 64, BF16, False),
    (QWEN, 0, BF16, True),
    (QWEN, 256, BF16, True),
    ((14, 2, 128), 128, BF16, True),
    ((6, 1, 128), 32, FP16, False),
    ((5, 5, 64), 16, BF16, True),
    ((4, 1, 64), 64, FP16, True),
    ((7, 2, 64), 6, BF16, True),
    ((7, 2, 64), 6, FP16, False),
    ((3, 1, 40), 12, FP16, True),
    ((3, 2, 104), 72, BF16, True),
    ((2, 1, 8), 8, BF16, True),
    ((2, 1, 8), 2, FP16, False),
    ((4, 4, 512), 512, BF16, True),
    ((3, 1, 512), 2, FP16, True),
    ((3, 2, 320), 192, BF16, True),
]


def on_gpu(shape, rope_dim, **options) -> QkProblem:
    return make_qk(shape, rope_dim, device=CUDA, **options)


def call(problem: QkProblem) -> QkProblem:
    ops.qk_norm_rope(*problem.operands.values(), qk_norm_eps=problem.eps)
    return problem


def assert_matches(actual: QkProblem, expected: QkProblem) -> None:
    """Within one rounding, and all but a few values the very same."""
    for name in ("q", "k"):
        assert_close(actual[name], expected[name], name)
        differ = int(((actual[name] != expected[name]) & ~actual[name].isnan()).sum())
        assert differ <= max(2, 0.01 * expected[name].numel()), f"{name}: {differ} values differ"


@pytest.mark.parametrize(("heads", "rope_dim", "dtype", "has_norm"), GRID)
def test_against_the_reference(heads, rope_dim, dtype, has_norm):
    """Odd lengths, slab and compact, tables of every batch entry or one for all."""
    for i, (b, s) in enumerate(((1, 1), (2, 37), (3, 129), (1, 515))):
        problem = on_gpu(
            (b, s, *heads),
            rope_dim,
            dtype=dtype,
            has_norm=has_norm,
            in_slab=i % 2 == 0,
            is_expanded=i > 1,
            spare_rows=i,
        )
        expected = problem.expected()
        assert_matches(call(problem), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_fp64(dtype):
    problem = on_gpu((2, 65, *QWEN), 64, dtype=dtype)
    exact = replace(problem, operands={n: t.double().clone() for n, t in problem.operands.items()})
    call(problem)
    for name, weight in (("q", "w_q_norm"), ("k", "w_k_norm")):
        x = exact[name] / (exact[name].square().mean(-1, keepdim=True) + problem.eps).sqrt()
        x = x * exact[weight]
        turn = torch.complex(x[..., :32], x[..., 32:64])
        cos, sin = (exact[table][:, :65, None] for table in ("cos", "sin"))
        real = turn.real * cos[..., :32] - turn.imag * sin[..., :32]
        imag = turn.imag * cos[..., 32:] + turn.real * sin[..., 32:]
        expected = torch.cat((real, imag, x[..., 64:]), -1)
        assert_close(problem[name], expected.to(dtype), name)


@pytest.mark.parametrize("tokens", [568, 569])
def test_channels_past_rope_dim_are_the_normed_ones(tokens):
    """S18: just below and above 10240 heads, bit for bit; the rotated ones are right too."""
    assert (tokens * 18 > 10240) == (tokens == 569)
    for rope_dim in (64, 6, 192):
        problem = on_gpu((1, tokens, *QWEN), rope_dim)
        expected = problem.expected()
        plain = call(problem.clone().with_(cos=None, sin=None))
        assert_matches(call(problem), expected)
        for name in ("q", "k"):
            assert_same_bits(problem[name][..., rope_dim:], plain[name][..., rope_dim:], name)


def test_pairs_are_the_documented_ones():
    """S18: half pairs, 90 degrees for pair 0."""
    q = torch.zeros(1, 1, 1, 8, dtype=BF16, device=CUDA)
    q[..., 0] = 1
    k = q.clone()
    cos = torch.tensor([0.0, 1, 0, 1], dtype=BF16, device=CUDA).view(1, 1, 4)
    sin = torch.tensor([1.0, 0, 1, 0], dtype=BF16, device=CUDA).view(1, 1, 4)
    ops.qk_norm_rope(q, k, cos=cos, sin=sin)
    assert q.flatten().tolist() == k.flatten().tolist() == [0, 0, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope_dim", [6, 14, 64])
def test_without_a_norm_other_channels_keep_their_bits(dtype, rope_dim):
    problem = on_gpu((2, 37, *QWEN), rope_dim, dtype=dtype, has_norm=False)
    for name in ("q", "k"):
        x = problem[name]
        x.copy_(random_bits(tuple(x.shape), dtype, CUDA))
    before, expected = problem.clone(), problem.expected()
    call(problem)
    for name in ("q", "k"):
        assert_same_bits(problem[name][..., rope_dim:], before[name][..., rope_dim:], name)
        assert_close(problem[name], expected[name], name)


@pytest.mark.parametrize("has_norm", [True, False])
def test_the_rest_of_the_slab_is_not_touched(has_norm):
    problem = on_gpu((2, 37, *QWEN), 64, has_norm=has_norm)
    slab = problem["q"]._base
    before = slab.clone()
    call(problem)
    width = 16 * 256
    assert_same_bits(slab[..., width : width + 40], before[..., width : width + 40], "gap")
    assert_same_bits(slab[..., -24:], before[..., -24:], "end")


def test_every_stride_that_the_contract_allows():
    """Padded heads, heads outside tokens, tokens outside batches, other orders for Q and K."""
    b, s, h, d = 3, 41, 4, 64
    base = on_gpu((b, s, h, 2, d), 16, in_slab=False)
    expected = base.expected()
    strides = [
        (s * h * d, d, s * d, 1),
        (s * h * 72, h * 72, 72, 1),
        (8 * d, b * 8 * d, d, 1),
        (d, b * h * d, b * d, 1),
    ]
    for q_stride in strides:
        for k_stride in strides:
            q, k = (
                torch.empty(
                    sum((n - 1) * step for n, step in zip(x.shape, of, strict=True)) + 1,
                    dtype=BF16,
                    device=CUDA,
                )
                .as_strided(x.shape, of)
                .copy_(x)
                for x, of in ((base["q"], q_stride), (base["k"], k_stride))
            )
            done = call(base.with_(q=q, k=k))
            assert_matches(done, expected)


def test_tables_of_every_layout():
    """Row pitches, one row for all tokens, and rows past S that hold NaN and are not read (S19)."""
    base = on_gpu((3, 41, 4, 2, 64), 16, in_slab=False, spare_rows=0)
    expected = base.expected()
    wide = torch.full((3, 50, 40), math.nan, dtype=BF16, device=CUDA)
    tables = {}
    for name, at in (("cos", 0), ("sin", 24)):
        tables[name] = wide[..., at : at + 16]
        tables[name][:, :41] = base[name]
    assert_matches(call(base.clone().with_(**tables)), expected)
    one = {n: base[n][:, :1].expand(-1, 41, -1) for n in ("cos", "sin")}
    problem = base.clone().with_(**one)
    expected = problem.expected()
    assert_matches(call(problem), expected)
    for rope_dim in (6, 12, 24):  # rows that are compact and no multiple of 16 bytes
        problem = on_gpu((2, 41, 4, 2, 64), rope_dim)
        expected = problem.expected()
        assert_matches(call(problem), expected)


def test_a_table_at_the_end_of_a_poisoned_buffer():
    """S19: the last row that is read is the last one before NaN."""
    for rope_dim in (16, 6):
        problem = on_gpu((1, 8, 2, 1, 64), rope_dim, spare_rows=0)
        expected = problem.expected()
        for name in ("cos", "sin"):
            size = 8 * rope_dim
            buffer = torch.full((4096,), math.nan, dtype=BF16, device=CUDA)
            buffer[:size] = problem[name].flatten()
            problem = problem.with_(**{name: buffer[:size].view(1, 8, rope_dim)})
        assert_matches(call(problem), expected)


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize("rope_dim", [64, 6])
def test_a_bad_value_stays_in_its_head(has_norm, rope_dim):
    problem = on_gpu((2, 37, *QWEN), rope_dim, has_norm=has_norm)
    clean = call(problem.clone())
    for value in (math.nan, math.inf, -math.inf):
        for channel in (0, rope_dim // 2, rope_dim - 1, 255):
            spoilt = problem.clone()
            spoilt["q"][1, 20, 7, channel] = value
            expected = spoilt.expected()
            call(spoilt)
            assert_close(spoilt["q"][1, 20, 7], expected["q"][1, 20, 7], "the head")
            spoilt["q"][1, 20, 7] = clean["q"][1, 20, 7]
            for name in ("q", "k"):
                assert_same_bits(spoilt[name], clean[name], name)


def test_huge_and_tiny_values():
    """A mean square that overflows gives 0, as in FP32; eps bears a head of zeros."""
    problem = on_gpu((1, 9, *QWEN), 64, in_slab=False)
    problem["q"][0, 0] = 3e38
    problem["q"][0, 1] = 0
    problem["q"][0, 2] = 1e-30
    expected = problem.expected()
    call(problem)
    assert not problem["q"][0, :2].any()
    assert problem["q"].isfinite().all()
    assert_matches(problem, expected)


def test_eps_is_no_compile_key():
    problems = [on_gpu((1, 9, *QWEN), 64, eps=eps) for eps in (1e-6, 1e-5, 0.5)]
    for i, problem in enumerate(problems):
        expected = problem.expected()
        compiled = KERNELS.stats().compiled
        problem.run()
        assert i == 0 or KERNELS.stats().compiled == compiled
        assert_matches(problem, expected)


def test_one_plan_serves_every_shorter_length_and_smaller_batch():
    plan = on_gpu((2, 8192, 4, 2, 64), 16, in_slab=False, spare_rows=0).plan()
    plan.compile()
    compiled = KERNELS.stats().compiled
    for b, s in ((2, 8192), (1, 8191), (2, 1), (1, 1000), (0, 5), (2, 0)):
        problem = on_gpu((b, s, 4, 2, 64), 16, in_slab=s % 2 == 0 and b > 0, spare_rows=0)
        expected = problem.expected()
        problem.run(plan)
        if b * s:
            assert_matches(problem, expected)
    assert KERNELS.stats().compiled == compiled


def test_the_same_bits_whatever_the_batch():
    """A token's result depends on nothing but the token: alone, or among others."""
    problem = on_gpu((3, 129, *QWEN), 64, in_slab=False)
    single = problem.clone()
    call(problem)
    for b, s in ((0, 0), (1, 64), (2, 128)):
        one = {
            n: t if t.dim() == 1 else t[b : b + 1, s : s + 1].clone()
            for n, t in single.operands.items()
        }
        done = call(single.with_(**one))
        for name in ("q", "k"):
            assert_same_bits(done[name], problem[name][b : b + 1, s : s + 1], name)
