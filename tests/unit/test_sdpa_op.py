# SPDX-License-Identifier: Apache-2.0
"""SdpaFwd and ``ops.sdpa_fwd`` on the CPU: calls, views, refusals, the functional form."""

from __future__ import annotations

import math

import pytest
import torch

from cudnn_blocks import (
    ContractError,
    GatedAttentionGeometry,
    GradModeError,
    NotServedError,
    SdpaFwd,
    SdpaGeometry,
    ops,
)
from cudnn_blocks.plan_cache import PLANS
from tests.helpers.sdpa_problem import assert_matches, make_problem
from tests.helpers.tensors import assert_same_bits

torch.set_num_threads(1)

BAND = {"causal_bottom_right": True, "window_left": 3, "window_right": 1}


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (6, 2), (6, 1), (14, 2), (7, 1)])
@pytest.mark.parametrize("mask", [{}, {"is_causal": False}, BAND], ids=["causal", "full", "band"])
def test_ratios_of_heads(heads, mask):
    """S21: every ratio of query to key heads."""
    problem = make_problem(heads=heads, s=5, sk=6, d_head=16, **mask)
    assert_matches(problem.clone().run(), problem.expected())


def test_bands_of_a_slab():
    problem = make_problem(is_slab=True, has_gate=True, seq_lens=[7, 3])
    assert problem["q"].stride()[1:] == problem["k"].stride()[1:] == (12 * 64, 64, 1)
    copies = problem.with_(**{n: problem[n].contiguous() for n in ("q", "k", "v", "gate")})
    got, wanted = problem.clone().run(), copies.clone().run()
    for name in ("o", "lse"):
        assert_same_bits(got[name], wanted[name], name)
    assert_matches(got, problem.expected())


def test_an_output_inside_a_wider_array():
    problem = make_problem()
    wide = torch.full((2, 7, 10, 64), math.nan, dtype=torch.bfloat16)
    problem.with_(o=wide[:, :, 3:7]).run()
    assert_same_bits(wide[:, :, 3:7], problem.clone().run()["o"], "o")
    assert torch.isnan(wide[:, :, :3]).all()
    assert torch.isnan(wide[:, :, 7:]).all()


def test_a_block_geometry_serves():
    block = GatedAttentionGeometry(
        d_model=256, h_q=4, h_kv=2, d_head=64, rope_dim=0, attn_scale=0.3, window_left=2
    )
    problem = make_problem(attn_scale=0.3, window_left=2)
    operands = [problem[name] for name in ("q", "k", "v", "o")]
    plan = SdpaFwd(*operands, block, return_lse=True)
    plan.compile()
    plan.execute(**problem.operands)
    assert plan.geometry == problem.geometry
    assert_matches(problem, problem.expected())


@pytest.mark.parametrize("extents", [(3, 0, 5), (0, 4, 5), (0, 0, 0)])
def test_nothing_to_do(extents):
    """S29: an empty batch or no query row is an empty result."""
    b, s, sk = extents
    problem = make_problem(b, s, sk, has_gate=True, seq_lens=[1] * b)
    problem.run()
    assert problem["o"].shape == (b, s, 4, 64)
    o = ops.sdpa_fwd(problem["q"], problem["k"], problem["v"])
    assert o.shape == (b, s, 4, 64)


def test_a_plan_serves_every_smaller_call():
    plan = make_problem(3, 20, 24).compiled()
    for extents in ((3, 20, 24), (1, 20, 24), (2, 1, 1), (3, 7, 2), (0, 20, 24)):
        problem = make_problem(*extents)
        assert_matches(problem.run(plan), problem.expected())
    for extents, symbol in (((4, 20, 24), "B"), ((3, 21, 24), "S"), ((3, 20, 25), "Sk")):
        with pytest.raises(ContractError, match=rf"^{symbol}: expected at most"):
            make_problem(*extents).run(plan)


def test_no_keys_at_all():
    with pytest.raises(ContractError, match="^k: expected at least one key; seq_lens may hide it"):
        make_problem(2, 3, 0).plan().check_support()
    plan = make_problem(2, 3, 4).compiled()
    with pytest.raises(ContractError, match="^k: expected at least one key"):
        make_problem(2, 3, 0).run(plan)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"h_q": 3, "h_kv": 2}, "^h_q: expected a multiple of h_kv = 2, got 3"),
        ({"h_q": 33, "h_kv": 2}, "^h_q: expected a multiple"),
        ({"h_q": 2, "h_kv": 4}, "^h_q: expected a multiple"),
        ({"h_q": 0, "h_kv": 1}, "^h_q: expected a positive size, got 0"),
        ({"h_kv": 0}, "^h_kv: expected a positive size"),
        ({"d_head": 0}, "^d_head: expected a positive size"),
        ({"attn_scale": 0.0}, "^attn_scale: expected a positive number"),
        ({"attn_scale": math.nan}, "^attn_scale: expected a positive number"),
        ({"attn_scale": math.inf}, "^attn_scale: expected a positive number"),
        ({"window_left": -2}, "^window_left: expected -1 for no bound, or a count, got -2"),
        ({"window_right": -2}, "^window_right: expected -1"),
        ({"is_causal": False, "causal_bottom_right": True}, "^causal_bottom_right: expected False"),
        ({"is_causal": False, "window_right": 0}, "^window_right: expected -1 where is_causal"),
    ],
)
def test_a_geometry_outside_the_contract(fields, match):
    """S21, among others."""
    geometry = SdpaGeometry(**{"h_q": 4, "h_kv": 2, "d_head": 64, **fields})
    with pytest.raises(ContractError, match=match):
        geometry.validate()
    sample = torch.empty(1, 1, 4, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ContractError, match=match):
        SdpaFwd(sample, sample, sample, sample, geometry, target="sm_90a").check_support()


def test_the_edges_of_the_geometry():
    for fields in (
        {"window_left": 0, "window_right": 0},
        {"window_left": 2**40, "window_right": 2**40},
        {"is_causal": False, "window_left": 0},
        {"attn_scale": 1e-30},
    ):
        SdpaGeometry(4, 4, 1, **fields).validate()
    assert SdpaGeometry(1, 1, 64).scale == 0.125
    assert SdpaGeometry(1, 1, 64, attn_scale=3.0).scale == 3.0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"k": (2, 7, 2, 32)}, r"^k: expected shape \[B = 2, Sk = 7, 2, 64\]"),
        ({"k": (2, 7, 3, 64)}, "^k: expected shape"),
        ({"v": (2, 6, 2, 64)}, r"axis 1 is 6, not 7"),
        ({"o": (2, 6, 4, 64)}, "^o: expected shape"),
        ({"lse": (2, 4, 6)}, "^lse: expected shape"),
        ({"seq_lens": (3,)}, "^seq_lens: expected shape"),
        ({"gate": (2, 7, 64)}, "^gate: expected shape"),
    ],
)
def test_a_wrong_shape(changes, match):
    problem = make_problem(has_gate=True, seq_lens=[7, 7])
    plan = problem.compiled()
    wrong = {name: torch.empty(shape, dtype=problem[name].dtype) for name, shape in changes.items()}
    with pytest.raises(ContractError, match=match):
        problem.with_(**wrong).run(plan)


def test_wrong_strides():
    problem = make_problem(has_gate=True)
    plan = problem.compiled()
    q = torch.empty(2, 7, 4, 65, dtype=torch.bfloat16)[..., :64]
    with pytest.raises(ContractError, match=r"^q: expected strides \(..., 1\), the others mult"):
        problem.with_(q=q).run(plan)
    transposed = torch.empty(2, 7, 64, 2, dtype=torch.bfloat16).transpose(2, 3)
    with pytest.raises(ContractError, match="^k: expected strides"):
        problem.with_(k=transposed).run(plan)
    repeated = torch.empty(1, 7, 4, 64, dtype=torch.bfloat16).expand(2, -1, -1, -1)
    problem.with_(q=repeated.clone().zero_()[:1].expand(2, -1, -1, -1)).run(plan)
    with pytest.raises(ContractError, match="^o: expected strides.* that keep all elements apart"):
        problem.with_(o=repeated).run(plan)


@pytest.mark.parametrize("name", ["q", "k", "v", "gate"])
def test_the_output_has_memory_of_its_own(name):
    problem = make_problem(heads=(2, 2), has_gate=True)
    plan = problem.compiled()
    with pytest.raises(ContractError, match="overlapping byte ranges"):
        problem.with_(o=problem[name]).run(plan)
    beside = torch.zeros(2, 7, 4, 64, dtype=torch.bfloat16)
    problem.with_(**{"o": beside[:, :, :2], name: beside[:, :, 2:]}).run(plan)


def test_operands_that_are_not_declared():
    problem = make_problem(has_gate=True, has_lse=True, seq_lens=[7, 7])
    plain = problem.with_(gate=None, lse=None, seq_lens=None)
    for name in ("gate", "lse", "seq_lens"):
        with pytest.raises(ContractError, match=f"^{name}: expected None"):
            plain.with_(**{name: problem[name]}).run(plain.compiled())
        with pytest.raises(ContractError, match=f"^{name}: expected a tensor, as declared"):
            problem.with_(**{name: None}).run(problem.compiled())


def test_wrong_types():
    problem = make_problem()
    operands = [problem[name] for name in ("q", "k", "v", "o")]
    with pytest.raises(TypeError, match="^geometry: expected SdpaGeometry or GatedAttention"):
        SdpaFwd(*operands, None)
    with pytest.raises(TypeError, match="^return_lse: expected bool, got int"):
        SdpaFwd(*operands, problem.geometry, return_lse=1)
    with pytest.raises(TypeError, match="^seq_lens_present: expected bool, got NoneType"):
        SdpaFwd(*operands, problem.geometry, seq_lens_present=None)
    with pytest.raises(TypeError, match="h_q"):
        SdpaGeometry(4.0, 2, 64)
    with pytest.raises(TypeError, match="is_causal"):
        SdpaGeometry(4, 2, 64, is_causal=1)


def test_dtypes():
    sample = torch.empty(1, 2, 4, 64)
    with pytest.raises(ContractError, match=r"^q: expected dtype torch.bfloat16 or torch.float16"):
        SdpaFwd(sample, sample, sample, sample, SdpaGeometry(4, 4, 64)).check_support()
    problem = make_problem()
    with pytest.raises(ContractError, match=r"^k: expected dtype torch.bfloat16"):
        problem.with_(k=problem["k"].half()).plan().check_support()
    long = torch.zeros(2, dtype=torch.int64)
    bounded = make_problem(seq_lens=[1, 2])
    with pytest.raises(ContractError, match=r"^seq_lens: expected dtype torch.int32"):
        bounded.with_(seq_lens=long).run(bounded.compiled())


def test_the_same_call_is_checked_once():
    problem = make_problem()
    plan = problem.compiled()
    plan._device_index = -1  # as on a GPU of that number, which CPU tensors answer with
    operands = list(problem.operands.values())
    assert plan._is_plainly_good(operands)
    assert len(plan._seen) == 1
    assert plan._is_plainly_good(operands)
    assert len(plan._seen) == 1


# The functional form.


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("seq_lens", [None, [0, 5]])
def test_functional(has_gate, seq_lens):
    problem = make_problem(has_gate=has_gate, seq_lens=seq_lens, attn_scale=0.2, **BAND)
    given = {n: t for n, t in problem.operands.items() if n not in ("o", "lse")}
    o, lse = ops.sdpa_fwd(**given, attn_scale=0.2, return_lse=True, **BAND)
    wanted = problem.clone().run()
    assert_same_bits(o, wanted["o"], "o")
    assert_same_bits(lse, wanted["lse"], "lse")
    assert o.is_contiguous()
    alone = ops.sdpa_fwd(**given, attn_scale=0.2, **BAND)
    assert_same_bits(alone, o, "o alone")


def test_functional_plans_are_few():
    """S22: each call has its own result; extents between powers of 2 share a plan."""
    for s in (5, 6, 7, 8):
        for mask in ({}, {"window_left": 1}, {"is_causal": False}, {"attn_scale": 0.5}):
            problem = make_problem(2, s, **mask)
            q, k, v = (problem[name] for name in ("q", "k", "v"))
            assert_same_bits(ops.sdpa_fwd(q, k, v, **mask), problem.run()["o"], f"{s} {mask}")
    assert PLANS.stats().size == 4


def test_functional_refusals():
    problem = make_problem()
    q, k, v = (problem[name] for name in ("q", "k", "v"))
    with pytest.raises(TypeError, match="^v: expected Tensor, got NoneType"):
        ops.sdpa_fwd(q, k, None)
    with pytest.raises(TypeError, match="^q: expected Tensor"):
        ops.sdpa_fwd("q", k, v)
    with pytest.raises(TypeError, match="window_left"):
        ops.sdpa_fwd(q, k, v, window_left=1.5)
    with pytest.raises(TypeError, match="^return_lse: expected bool"):
        ops.sdpa_fwd(q, k, v, return_lse=None)
    with pytest.raises(ContractError, match=r"^q: expected shape \[batch, length, heads, D\]"):
        ops.sdpa_fwd(q[0], k, v)
    with pytest.raises(ContractError, match="^v: expected shape"):
        ops.sdpa_fwd(q, k, v[:, :-1])
    with pytest.raises(ContractError, match="^h_q: expected a multiple of h_kv"):
        ops.sdpa_fwd(q[:, :, :3], k, v)
    with pytest.raises(GradModeError, match="^k: requires grad"):
        ops.sdpa_fwd(q, k.clone().requires_grad_(), v)
    assert ops.sdpa_fwd(q.to("meta"), k.to("meta"), v.to("meta")).shape == q.shape
    with pytest.raises(NotServedError, match="current_stream under tracing"):
        ops.sdpa_fwd(q.to("meta"), k, v, current_stream=0)


def test_library_entry():
    problem = make_problem(has_gate=True, seq_lens=[3, 7])
    given = tuple(problem[name] for name in ("q", "k", "v", "gate", "seq_lens"))
    torch.library.opcheck(torch.ops.cudnn_blocks.sdpa_fwd.default, given, {"return_lse": True})
    torch.library.opcheck(torch.ops.cudnn_blocks.sdpa_fwd.default, given[:3], {"window_left": 2})


def test_compiled_call():
    problem = make_problem()
    q, k, v = (problem[name] for name in ("q", "k", "v"))

    def twice(q, k, v):
        o, lse = ops.sdpa_fwd(q, k, v, window_left=3, return_lse=True)
        return o * 2, lse

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(q, k, v), twice(q, k, v), strict=True):
        assert_same_bits(got, wanted, "compiled")
