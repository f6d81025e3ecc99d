# SPDX-License-Identifier: Apache-2.0
"""Numbers of the products on the GPU: every engine and tile against the reference and torch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from cudnn_blocks import GatedAttentionGeometry
from tests.helpers.gemm_gpu import CUDA, ENGINES, SAMPLE_ROWS, compiled_plan, run_guarded
from tests.helpers.gemm_problem import DTYPES, ULP_OF_ONE, make_gemm, make_projection
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
engines = pytest.mark.parametrize("engine", ENGINES)
sample_rows = pytest.mark.parametrize("rows", SAMPLE_ROWS)

SHAPES = ((1, 1), (2, 1), (1, 2), (2, 7), (5, 3), (1, 64), (3, 43), (1, 129), (2, 150), (8, 130))
SIZES = ((8, 8), (264, 72), (1000, 200), (2048, 64), (520, 512), (1288, 1032))


def sized(d_head, h_q, h_kv, rope_dim, **options):
    return GatedAttentionGeometry(136, h_q, h_kv, d_head, rope_dim, **options)


GEOMETRIES = [
    sized(256, 16, 2, 64),
    sized(256, 4, 2, 128),
    sized(256, 2, 1, 256),
    sized(256, 2, 1, 254),
    sized(256, 2, 1, 6),
    sized(256, 3, 1, 0),
    sized(256, 3, 1, 64, qk_norm=False),
    sized(128, 8, 2, 128),
    sized(128, 5, 1, 64),
    sized(128, 3, 3, 20, qk_norm=False),
    sized(64, 4, 2, 64),
    sized(64, 6, 2, 20),
    sized(64, 14, 2, 2),
    sized(64, 8, 8, 32, qk_norm=False),
]

NORM_ROPES = [
    pytest.param(rows, DTYPES[i % 2], one, id=f"{rows}-D{one.d_head}-h{one.h_q}-R{one.rope_dim}")
    for rows, some in ((32768, GEOMETRIES), (512, GEOMETRIES[7:12:2]), (64, GEOMETRIES[::5]))
    for i, one in enumerate(some)
]
"""Every geometry in a large tile, some in the others; each is a kernel of its own."""


def tokens_of(rows):
    """Calls that a plan for so many rows takes."""
    return [(b, s) for b, s in SHAPES if s <= rows // 8]


@engines
@sample_rows
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_odd_sizes(engine, rows, dtype, sizes):
    """Integers, so that every bit is known; rows apart in memory every other time."""
    plan = compiled_plan(engine, rows, sizes, dtype)
    for tokens, pads in zip(
        tokens_of(rows), itertools.cycle(((0, 0, 0), (8, 24, 16))), strict=False
    ):
        problem = make_gemm((*tokens, *sizes), dtype=dtype, pads=pads, device=CUDA)
        run_guarded(problem, plan, f"{tokens} {sizes}").check()


@engines
@pytest.mark.parametrize(("rows", "dtype", "geometry"), NORM_ROPES)
def test_norm_and_rope(engine, rows, dtype, geometry):
    plan = compiled_plan(engine, rows, geometry, dtype)
    for i, tokens in enumerate(tokens_of(rows)):
        for data in ("integers", "normal"):
            problem = make_projection(
                geometry,
                tokens,
                dtype=dtype,
                data=data,
                pads=((0, 0), (8, 24))[i % 2],
                is_expanded=i % 3 == 0,
                spare_rows=0 if tokens[1] == rows // 8 else i % 2,
                device=CUDA,
            )
            done = run_guarded(problem, plan, f"{tokens} {data}")
            done.check(is_exact=data == "integers")


@engines
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(9216, 2048), (2048, 4096)])
def test_many_tiles_against_torch(engine, dtype, n, k):
    """Several waves of a persistent grid and a split last one, by an oracle in FP64."""
    problem = make_gemm((1, 2048, n, k), dtype=dtype, data="normal", device=CUDA)
    done = run_guarded(problem, compiled_plan(engine, 32768, (n, k), dtype), f"{n}x{k}")
    exact = F.linear(problem["x"].double(), problem["w"].double())
    ulp = ULP_OF_ONE[dtype]
    torch.testing.assert_close(done["y"].double(), exact, rtol=ulp, atol=ulp / 64)


@engines
@pytest.mark.parametrize("fuse_norm_rope", [True, False])
def test_a_row_has_the_same_bits_in_every_tile(engine, fuse_norm_rope):
    """Whatever rows are beside it, and whatever tile their number gets."""
    geometry = GatedAttentionGeometry(1000, 16, 2, 256, 64)
    options = {"fuse_norm_rope": fuse_norm_rope, "data": "normal", "device": CUDA}
    problem = make_projection(geometry, (1, 4000), spare_rows=0, **options)
    sizes = geometry if fuse_norm_rope else (geometry.n_qkvg, geometry.d_model)
    whole = run_sized(problem, compiled_plan(engine, 32768, sizes))
    for rows, length in itertools.product(SAMPLE_ROWS, (1, 7, 33, 100, 700, 2048)):
        if length <= rows // 8:
            part = problem.with_(
                **{name: problem[name][:, :length] for name in ("h", "proj")},
            )
            actual = run_sized(part, compiled_plan(engine, rows, sizes))
            assert_same_bits(actual, whole[:, :length], f"{rows} {length}")


def run_sized(problem, plan):
    """The slab, by a plan of either op."""
    slab = torch.full_like(problem.result, float("nan")).contiguous()
    h, w, _, *small = problem.operands.values()
    plan.execute(h, w, slab, *(small if problem.fuse_norm_rope else ()))
    return slab


@engines
@pytest.mark.parametrize("rows", [64, 32768])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_stay_in_their_row_and_head(engine, rows, bad):
    geometry = GEOMETRIES[0]
    plan = compiled_plan(engine, rows, geometry)
    tokens = (2, min(rows // 8, 70))
    clean = make_projection(geometry, tokens, device=CUDA)
    spoilt = clean.clone()
    spoilt["h"][1, 1, 7] = bad
    spoilt["w_qkvg"][300, 5] = bad
    clean.run(plan)
    spoilt.run(plan)
    keep = torch.ones(clean.result.shape, dtype=torch.bool, device=CUDA)
    keep[1, 1] = False
    keep[..., 256:512] = False
    assert_same_bits(spoilt.result[keep], clean.result[keep], "elsewhere")
    assert not spoilt.result[1, 1].isfinite().all()


@engines
def test_what_lies_between_the_rows_is_not_read(engine):
    """NaN in the gaps of x and w, and past K in the last rows' memory."""
    problem = make_gemm((2, 150, 520, 40), pads=(24, 88, 8), device=CUDA)
    run_guarded(problem, compiled_plan(engine, 32768, (520, 40)), "gaps").check()
    assert problem["x"]._base[..., 40:].isnan().all()
