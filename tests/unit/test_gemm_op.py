# SPDX-License-Identifier: Apache-2.0
"""Gemm, QkvGateProjection and their functional forms on the reference engine."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import (
    ContractError,
    GatedAttentionGeometry,
    Gemm,
    GradModeError,
    NotServedError,
    QkvGateProjection,
    ops,
)
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.gemm.stage import GemmStage
from cudnn_blocks.target import GPU_TARGET_NAMES
from tests.helpers.gemm_problem import (
    DTYPES,
    make_gemm,
    make_projection,
    spec_gemm,
    spec_projection,
)
from tests.helpers.tensors import assert_same_bits

BF16 = torch.bfloat16
SMALL = GatedAttentionGeometry(d_model=40, h_q=4, h_kv=2, d_head=64, rope_dim=12)
NEXT = GatedAttentionGeometry(d_model=2048, h_q=16, h_kv=2, d_head=256, rope_dim=64)


def call(problem, **options):
    h, w, _, *small = problem.operands.values()
    if problem.geometry is None:
        return ops.gemm(h, w, **options)
    options["fuse_norm_rope"] = problem.fuse_norm_rope
    return ops.qkv_gate_projection(h, w, problem.geometry, *small, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pads", [(0, 0, 0), (8, 16, 24)])
@pytest.mark.parametrize("shape", [(2, 5, 24, 40), (1, 1, 8, 8), (3, 1, 16, 24), (1, 7, 13, 5)])
def test_plan_and_function_follow_the_reference(dtype, pads, shape):
    if shape[3] % 8:
        pads = (0, 0, 0)
    problem = make_gemm(shape, dtype=dtype, pads=pads)
    problem.run().check()
    called = call(problem)
    problem.check(called)
    assert called.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_expanded", [True, False])
@pytest.mark.parametrize("fuse_norm_rope", [True, False])
@pytest.mark.parametrize("pads", [(0, 0), (8, 24)])
def test_projection_follows_the_reference(dtype, is_expanded, fuse_norm_rope, pads):
    options = {"is_expanded": is_expanded, "fuse_norm_rope": fuse_norm_rope, "pads": pads}
    problem = make_projection(SMALL, dtype=dtype, **options)
    problem.run().check()
    problem.check(call(problem))


def test_the_gaps_between_rows_are_not_touched():
    problem = make_gemm(pads=(8, 8, 8))
    problem.run()
    wide = problem["y"]._base
    assert wide[..., 24:].isnan().all()
    assert not wide[..., :24].isnan().any()


def test_a_plan_serves_smaller_extents():
    plan = make_projection(SMALL, (3, 8)).plan()
    plan.compile()
    for tokens, spare in (((3, 8), 0), ((1, 1), 300), ((2, 7), 3)):
        problem = make_projection(SMALL, tokens, spare_rows=spare)
        problem.run(plan).check()
    with pytest.raises(ContractError, match="S: expected at most 8, the sample's, got 9"):
        make_projection(SMALL, (1, 9), spare_rows=0).run(plan)


@pytest.mark.parametrize("tokens", [(0, 5), (2, 0)])
def test_an_empty_call_does_nothing(tokens):
    problem = make_projection(SMALL, tokens)
    problem.run()
    assert call(problem).shape == (*tokens, SMALL.n_qkvg)
    assert call(make_gemm((*tokens, 24, 40))).shape == (*tokens, 24)


def test_tables_shorter_than_the_sequence():
    """S19: at build and at a call; nothing is written."""
    match = "^cos: expected at least S = 5 rows, got 4 rows"
    problem = make_projection(SMALL, spare_rows=-1)
    with pytest.raises(ContractError, match=match):
        problem.plan().check_support()
    plan = make_projection(SMALL, spare_rows=0).plan()
    plan.compile()
    with pytest.raises(ContractError, match=match):
        problem.run(plan)
    assert problem.result.isnan().all()


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


BAD_GEMM = [
    ({"x": zeros(5, 40)}, r"^x: expected shape \[B, S, K\], got \[5, 40\]"),
    ({"w": zeros(24)}, r"^w: expected shape \[N, K\], got \[24\]"),
    ({"w": zeros(24, 32)}, r"^w: expected shape \[24, 40\]"),
    ({"y": zeros(2, 5, 32)}, r"^y: expected shape \[B = 2, S = 5, 24\]"),
    ({"y": zeros(2, 4, 24)}, r"^y: expected shape \[B = 2, S = 5, 24\]"),
    ({"x": zeros(2, 5, 40, dtype=torch.float32)}, "^x: expected dtype"),
    ({"w": zeros(24, 40, dtype=torch.float16)}, "^w: expected dtype torch.bfloat16"),
    ({"x": zeros(2, 5, 44)[..., :40]}, r"^x: expected strides \(5 \* ld, ld, 1\)"),
    ({"x": zeros(2, 6, 40)[:, :5]}, r"^x: expected strides \(5 \* ld, ld, 1\)"),
    ({"x": zeros(2, 40, 5).transpose(1, 2)}, r"^x: expected strides \(5 \* ld, ld, 1\)"),
    ({"x": zeros(1, 1, 40).expand(2, 5, 40)}, r"^x: expected strides \(5 \* ld, ld, 1\)"),
    ({"w": zeros(40, 24).t()}, r"^w: expected strides \(..., 1\)"),
    ({"y": zeros(1, 5, 24).expand(2, 5, 24)}, r"^y: expected strides \(5 \* ld, ld, 1\)"),
    ({"x": zeros(401)[1:].view(2, 5, 40)}, "^x: expected a 16-byte aligned address"),
]


@pytest.mark.parametrize(("changes", "match"), BAD_GEMM, ids=range(len(BAD_GEMM)))
def test_what_breaks_the_contract(changes, match):
    """As a sample, and as an operand of a plan for good samples."""
    good = make_gemm()
    bad = good.with_(**changes)
    with pytest.raises(ContractError, match=match):
        bad.plan().check_support()
    plan = good.plan()
    plan.compile()
    with pytest.raises(
        ContractError,
        match=match.replace("B, S, K", "B = 2, S = 5, 40|B, S, 40").replace("N, K", "24, 40"),
    ):
        bad.run(plan)


def test_overlap_with_the_result():
    shared = zeros(2, 5, 40)
    problem = make_gemm((2, 5, 40, 40)).with_(x=shared, y=shared)
    with pytest.raises(ContractError, match="^y: expected memory of its own"):
        problem.run()


def test_small_operands_agree_with_the_knobs():
    fused, plain = make_projection(SMALL), make_projection(SMALL, fuse_norm_rope=False)
    match = "^w_q_norm: expected a sample, with fuse_norm_rope, got None"
    with pytest.raises(ContractError, match=match):
        fused.with_(w_q_norm=None).plan().check_support()
    with pytest.raises(ContractError, match="^sin: expected None, since the epilogue has no use"):
        plain.with_(sin=fused["sin"]).plan().check_support()
    plan = fused.plan()
    plan.compile()
    with pytest.raises(ContractError, match="^cos: expected a tensor, as declared"):
        fused.with_(cos=None).run(plan)


def test_wrong_types():
    problem = make_projection(SMALL)
    h, w, proj, *_ = problem.operands.values()
    with pytest.raises(TypeError, match="geometry: expected GatedAttentionGeometry, got dict"):
        QkvGateProjection(h, w, proj, {})
    with pytest.raises(TypeError, match="fuse_norm_rope: expected bool, got int"):
        QkvGateProjection(h, w, proj, SMALL, fuse_norm_rope=1)
    with pytest.raises(TypeError, match="sample_w: expected a torch.Tensor or TensorSpec"):
        Gemm(h, [1], proj)
    with pytest.raises(TypeError, match="w: expected Tensor, got NoneType"):
        ops.gemm(h, None)
    with pytest.raises(TypeError, match="w_qkvg: expected Tensor, got NoneType"):
        ops.qkv_gate_projection(h, None, SMALL)


def test_grad_mode():
    problem = make_gemm()
    problem["x"].requires_grad_()
    with pytest.raises(GradModeError, match="^x: requires grad"):
        problem.run()
    with torch.no_grad():
        problem.run().check()


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
def test_the_default_engine_of_every_target(target):
    engine = "hopper" if target == "sm_90a" else "portable"
    for plan in (
        spec_gemm((1, 4096, 2048, 4096), target=target),
        spec_projection(NEXT, (1, 4096), target=target),
    ):
        plan.check_support()
        (stage,) = plan._stages
        assert stage.engine == engine
        assert "tiles" in stage.describe()
        assert plan.get_workspace_size() == 0


@pytest.mark.parametrize("engine", ["hopper", "portable"])
@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((1, 64, 12, 40), r"n=12 \(served: multiples of 8\)"),
        ((1, 64, 16, 20), r"k=20 \(served: multiples of 8\)"),
    ],
)
def test_sizes_without_a_row(engine, shape, match):
    with pytest.raises(NotServedError, match=match):
        spec_gemm(shape, target="sm_90a", engines={"gemm": engine}).check_support()
    spec_gemm(shape, target="cpu").check_support()


def test_more_rows_than_are_numbered():
    plan = spec_gemm((2**16, 2**15, 8, 8), target="sm_80")
    with pytest.raises(NotServedError, match=r"rows=2147483648 \(served: up to 2147418112\)"):
        plan.check_support()


def test_heads_that_the_epilogue_does_not_serve_name_the_way_out():
    geometry = GatedAttentionGeometry(d_model=64, h_q=2, h_kv=2, d_head=96, rope_dim=32)
    plan = spec_projection(geometry, (1, 64), target="sm_90a")
    match = r"^qkv_gate_proj_norm_rope: .*normed_d_head=96 .*the projection, then qk_norm_rope"
    with pytest.raises(NotServedError, match=match):
        plan.check_support()


def test_the_cudnn_engine_declines_a_named_target():
    for plan in (spec_gemm((1, 64, 16, 16), target="sm_90a", engines={"gemm": "cudnn"}),):
        with pytest.raises(NotServedError, match=r"cudnn: device=None \(served: samples on a GPU"):
            plan.check_support()
    pin = {"qkv_gate_proj_norm_rope": "cudnn"}
    with pytest.raises(NotServedError, match=r"cudnn: normed_d_head=256 \(served: None\)"):
        spec_projection(NEXT, (1, 64), target="sm_90a", engines=pin).check_support()


def test_a_plan_is_found_again():
    problem = make_gemm((1, 3, 24, 40))
    PLANS.clear()
    call(problem)
    call(problem.clone())
    stats = PLANS.stats()
    assert (stats.misses, stats.size) == (1, 1)
    call(make_gemm((1, 4, 24, 40)))
    assert PLANS.stats().size == 2


@pytest.mark.parametrize("fuse_norm_rope", [True, False])
def test_tracing(fuse_norm_rope):
    problem = make_projection(SMALL, fuse_norm_rope=fuse_norm_rope)
    h, w, _, *small = problem.operands.values()

    def layer(h):
        slab = ops.qkv_gate_projection(h, w, SMALL, *small, fuse_norm_rope=fuse_norm_rope)
        return ops.gemm(slab, torch.ones(8, SMALL.n_qkvg, dtype=BF16))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same_bits(compiled(h), layer(h), "traced")
    names = ("d_model", "h_q", "h_kv", "d_head", "rope_dim", "qk_norm_eps", "qk_norm")
    sizes = [getattr(SMALL, name) for name in names]
    torch.library.opcheck(
        torch.ops.cudnn_blocks.qkv_gate_projection.default,
        (h, w, *small, *sizes, fuse_norm_rope),
        test_utils=("test_schema", "test_faketensor"),
    )
    torch.library.opcheck(torch.ops.cudnn_blocks.gemm.default, (h, w))


def test_a_block_has_several_of_the_stage():
    names = {plan._stages[0].name for plan in map(_checked, (SMALL, SMALL))}
    assert names == {"qkv_gate_proj_norm_rope"}
    assert GemmStage.name == "gemm"


def _checked(geometry):
    plan = make_projection(geometry).plan()
    plan.check_support()
    return plan
