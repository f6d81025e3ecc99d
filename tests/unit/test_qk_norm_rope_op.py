# SPDX-License-Identifier: Apache-2.0
"""QkNormRope and its functional form on the reference engine: results, refusals, tracing."""

from __future__ import annotations

import math

import pytest
import torch

from cudnn_blocks import ContractError, GradModeError, NotServedError, QkNormRope, TensorSpec, ops
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.target import TARGET_NAMES
from tests.helpers.pointwise_problem import DTYPES, QkProblem, make_qk, spec_qk
from tests.helpers.tensors import assert_same_bits, storage_bytes

BF16 = torch.bfloat16


def call(problem: QkProblem, **options):
    ops.qk_norm_rope(*problem.operands.values(), qk_norm_eps=problem.eps, **options)
    return problem


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_slab", [True, False])
@pytest.mark.parametrize("is_expanded", [True, False])
@pytest.mark.parametrize(("rope_dim", "has_norm"), [(16, True), (0, True), (6, False), (64, True)])
def test_plan_and_function_follow_the_reference(dtype, in_slab, is_expanded, rope_dim, has_norm):
    problem = make_qk(
        rope_dim=rope_dim, dtype=dtype, in_slab=in_slab, is_expanded=is_expanded, has_norm=has_norm
    )
    expected, called = problem.expected(), call(problem.clone())
    problem.run()
    for name in ("q", "k"):
        assert_same_bits(problem[name], expected[name], name)
        assert_same_bits(called[name], expected[name], name)


def test_the_rest_of_the_slab_is_not_touched():
    problem = make_qk((2, 5, 4, 2, 64), 16)
    slab = problem["q"]._base
    before = slab.clone()
    problem.run()
    assert_same_bits(slab[..., 256:296], before[..., 256:296], "between the bands")
    assert_same_bits(slab[..., 424:], before[..., 424:], "after the bands")


def test_a_plan_serves_smaller_extents_and_shorter_tables():
    plan = make_qk((3, 8, 4, 2, 64), 16).plan()
    plan.compile()
    for shape, spare in (((3, 8, 4, 2, 64), 0), ((1, 1, 4, 2, 64), 0), ((2, 7, 4, 2, 64), 4)):
        problem = make_qk(shape, 16, spare_rows=spare)
        expected = problem.expected()
        assert_same_bits(problem.run(plan)["q"], expected["q"], "q")
    with pytest.raises(ContractError, match="S: expected at most 8, the sample's, got 9"):
        make_qk((1, 9, 4, 2, 64), 16, spare_rows=0).run(plan)
    with pytest.raises(ContractError, match="T: expected at most 11, the sample's, got 12"):
        make_qk((1, 8, 4, 2, 64), 16, spare_rows=4).run(plan)


def test_tables_shorter_than_the_sequence():
    """S19: at build, at a call, and in the functional form; nothing is written."""
    match = "^cos: expected at least S = 9 rows, got 8 rows"
    problem = make_qk((2, 9, 4, 2, 64), 16, spare_rows=-1)
    with pytest.raises(ContractError, match=match):
        problem.plan().check_support()
    plan = make_qk((2, 9, 4, 2, 64), 16).plan()
    plan.compile()
    before = problem.clone()
    for run in (lambda: problem.run(plan), lambda: call(problem)):
        with pytest.raises(ContractError, match=match):
            run()
        assert_same_bits(problem["q"], before["q"], "q")
    short = make_qk((2, 8, 4, 2, 64), 16, spare_rows=0)
    expected = short.expected()
    assert_same_bits(short.run(plan)["k"], expected["k"], "k")


@pytest.mark.parametrize("shape", [(0, 5, 4, 2, 64), (2, 0, 4, 2, 64), (0, 0, 4, 2, 64)])
def test_an_empty_call_does_nothing(shape):
    problem = make_qk(shape, 16, in_slab=False, spare_rows=0)
    call(problem.run())
    plan = make_qk((2, 5, 4, 2, 64), 16).plan()
    plan.compile()
    problem.run(plan)


@pytest.mark.parametrize("target", TARGET_NAMES)
@pytest.mark.parametrize(
    ("rope_dim", "expected"),
    [
        (7, "an even number from 0 to d_head = 64"),
        (66, "an even number from 0 to d_head = 64"),
        (63, "an even number from 0 to d_head = 64"),
    ],
)
def test_rope_dims_that_do_not_fit(rope_dim, expected, target):
    """S18."""
    with pytest.raises(ContractError, match=f"^rope_dim: expected {expected}, got {rope_dim}"):
        spec_qk(rope_dim=rope_dim, target=target).check_support()
    with pytest.raises(ContractError, match="^rope_dim: "):
        call(make_qk(rope_dim=rope_dim))


def zeros(*shape):
    return torch.zeros(shape, dtype=BF16)


BAD = [
    ({"q": zeros(2, 5, 256)}, r"^q: expected shape \[B, S, h_q, D\], got \[2, 5, 256\]"),
    ({"k": zeros(2, 5, 2, 32)}, r"^k: expected shape \[B = 2, S = 5, 2, 64\]"),
    ({"k": zeros(2, 4, 2, 64)}, r"^k: expected shape \[B = 2, S = 5, 2, 64\]"),
    ({"w_q_norm": zeros(32)}, r"^w_q_norm: expected shape \[64\]"),
    ({"w_k_norm": zeros(128)[::2]}, "^w_k_norm: expected contiguous strides"),
    ({"w_k_norm": None}, "^w_k_norm: expected a tensor, since w_q_norm is one, got None"),
    ({"w_q_norm": None}, "^w_q_norm: expected a tensor, since w_k_norm is one, got None"),
    ({"sin": None}, "^sin: expected a tensor, since cos is one, got None"),
    ({"cos": zeros(5, 16)}, r"^cos: expected shape \[B, T, rope_dim\]"),
    ({"cos": zeros(1, 8, 16)}, r"^cos: expected shape \[B = 2, T, 16\]"),
    ({"sin": zeros(2, 8, 18)}, r"^sin: expected shape \[B = 2, T = 8, 16\]"),
    ({"sin": zeros(2, 7, 16)}, r"^sin: expected shape \[B = 2, T = 8, 16\]"),
    ({"cos": zeros(2, 8, 0)}, "^cos: expected rope_dim of at least 2, or None"),
    ({"cos": zeros(2, 8, 20)[..., :16]}, r"^cos: expected strides \(\.\.\., 1\), the others"),
    ({"cos": zeros(2, 16, 8).mT}, r"^cos: expected strides \(\.\.\., 1\), the others"),
    ({"q": zeros(2, 5, 4, 68)[..., :64]}, r"^q: expected strides .*multiples of 8"),
    (
        {"q": zeros(2, 4, 5, 64).transpose(1, 2)[:, :1].expand(2, 5, 4, 64)},
        "keep all elements apart",
    ),
]


@pytest.mark.parametrize(("changes", "match"), BAD)
def test_a_bad_sample_or_operand(changes, match):
    problem = make_qk(in_slab=False)
    bad = problem.with_(**changes)
    with pytest.raises(ContractError, match=match):
        bad.plan().check_support()
    before = problem.clone()
    with pytest.raises(ContractError):
        bad.run(problem_plan())
    with pytest.raises(ContractError):
        call(bad)
    for name in ("q", "k"):
        assert_same_bits(problem[name], before[name], name)


def problem_plan():
    plan = make_qk(in_slab=False).plan()
    plan.compile()
    return plan


def test_neither_norm_nor_rotation():
    with pytest.raises(
        ContractError, match="^rope_dim: expected at least 2 where there is no norm"
    ):
        spec_qk(rope_dim=0, has_norm=False, target="sm_90a").check_support()
    with pytest.raises(ContractError, match="^rope_dim: "):
        call(make_qk(rope_dim=0, has_norm=False))


@pytest.mark.parametrize("eps", [0.0, -1e-6, math.nan, math.inf])
def test_bad_eps(eps):
    with pytest.raises(ContractError, match="^qk_norm_eps: expected a positive number"):
        spec_qk(qk_norm_eps=eps, target="sm_90a").check_support()


def test_wrong_types():
    problem = make_qk()
    for name in ("q", "w_k_norm"):
        with pytest.raises(TypeError, match=f"^(sample_)?{name}: expected "):
            problem.with_(**{name: "a tensor"}).plan()
        with pytest.raises(TypeError, match=f"^{name}: expected "):
            call(problem.with_(**{name: "a tensor"}))
    with pytest.raises(TypeError, match="^q: expected Tensor, got NoneType"):
        call(problem.with_(q=None))
    with pytest.raises(TypeError, match="^qk_norm_eps: expected float, got int"):
        problem.plan(qk_norm_eps=1)


def test_dtypes_outside_the_contract():
    for dtype in (torch.float32, torch.float64, torch.int16):
        with pytest.raises(ContractError, match=r"^q: expected dtype torch\.bfloat16 or"):
            spec_qk(dtype=dtype, target="sm_90a").check_support()
    problem = make_qk()
    with pytest.raises(ContractError, match="^cos: expected dtype torch.bfloat16, got torch.float"):
        problem.with_(cos=problem["cos"].float()).plan().check_support()


@pytest.mark.parametrize("name", ["k", "cos", "sin"])
def test_overlap_with_what_is_written(name):
    problem = make_qk((2, 5, 4, 4, 64), 64, in_slab=False, spare_rows=0)
    memory = storage_bytes(problem["q"]).view(BF16)
    shape = problem[name].shape
    strides = torch.empty(shape, device="meta").stride()
    with pytest.raises(ContractError, match=f"^q: .* apart from {name}, got overlapping"):
        problem.with_(**{name: memory.as_strided(shape, strides)}).run()


def test_bands_that_share_columns():
    problem = make_qk((2, 5, 4, 2, 64), 16)
    slab = problem["q"]._base
    k = slab[..., 192:320].unflatten(-1, (2, 64))
    with pytest.raises(ContractError, match="^q: .* apart from k, got overlapping"):
        problem.with_(k=k).run()


@pytest.mark.parametrize("target", TARGET_NAMES)
@pytest.mark.parametrize("d_head", [4, 12, 100, 520, 1024])
def test_head_sizes_that_no_engine_serves(d_head, target):
    match = rf"d_head={d_head} \(served: multiples of 8 up to 512\)"
    with pytest.raises(NotServedError, match=match):
        spec_qk((2, 5, 4, 2, d_head), 4, target=target).check_support()
    with pytest.raises(NotServedError, match=match):
        call(make_qk((2, 5, 4, 2, d_head), 4, in_slab=False))


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_what_is_served(target):
    """Any number of heads, every multiple of 8 up to 512, every even rope_dim."""
    engine = "reference" if target == "cpu" else "portable"
    for shape, rope_dim, has_norm in [
        *(((2, 5, 4, 2, d_head), 2, True) for d_head in range(8, 513, 8)),
        *(((2, 5, 3, 2, 64), rope_dim, True) for rope_dim in range(0, 65, 2)),
        *(((1, 9, 1, 7, 64), rope_dim, False) for rope_dim in range(2, 65, 2)),
        ((2**20, 2**20, 16, 2, 256), 64, True),
    ]:
        for dtype in DTYPES:
            report = spec_qk(shape, rope_dim, dtype=dtype, has_norm=has_norm, target=target).probe()
            assert report.served, report.decline
            assert [stage.engine for stage in report.stages] == [engine]
            assert report.workspace_bytes == 0


def test_batches_that_the_kernel_cannot_number():
    shape = (1, 2**28, 7, 2, 64)
    match = rf"batch_heads={2**28 * 9} \(served: up to {2**31 - 2**16}\)"
    with pytest.raises(NotServedError, match=match):
        spec_qk(shape, 16, target="sm_90a").check_support()
    assert spec_qk(shape, 16, target="cpu").probe().served
    assert spec_qk((1, (2**31 - 2**16) // 8, 6, 2, 64), 16, target="sm_90a").probe().served


def test_pins():
    assert spec_qk(target="sm_90a", engines={"qk_norm_rope": "portable"}).probe().served
    for engine, target in (("reference", "sm_90a"), ("portable", "cpu")):
        with pytest.raises(NotServedError, match=f"{engine}: target={target} "):
            spec_qk(target=target, engines={"qk_norm_rope": engine}).check_support()
    with pytest.raises(NotServedError, match="engine=hopper"):
        spec_qk(target="sm_90a", engines={"qk_norm_rope": "hopper"}).check_support()
    with pytest.raises(ContractError, match="^engines: expected stage names among"):
        spec_qk(target="sm_90a", engines={"rope": "portable"}).check_support()


def test_one_functional_plan_for_every_batch_length_and_stride():
    for shape, in_slab, spare in (
        ((2, 5, 4, 2, 64), True, 0),
        ((1, 90, 4, 2, 64), False, 7),
        ((7, 1, 4, 2, 64), True, 1),
    ):
        problem = make_qk(shape, 16, in_slab=in_slab, spare_rows=spare, is_expanded=not in_slab)
        expected = problem.expected()
        assert_same_bits(call(problem)["k"], expected["k"], "k")
    assert PLANS.stats().size == 1
    call(make_qk(rope_dim=18))
    call(make_qk(dtype=torch.float16))
    call(make_qk(eps=1e-5))
    assert PLANS.stats().size == 4


def test_grad_mode():
    problem = make_qk(in_slab=False)
    weight = problem["w_q_norm"].clone().requires_grad_()
    with pytest.raises(GradModeError, match="^w_q_norm: requires grad"):
        call(problem.with_(w_q_norm=weight))
    with torch.no_grad():
        call(problem.with_(w_q_norm=weight))


@pytest.mark.parametrize(("rope_dim", "has_norm"), [(16, True), (0, True), (6, False)])
def test_opcheck(device, rope_dim, has_norm):
    problem = make_qk(rope_dim=rope_dim, has_norm=has_norm, in_slab=False, device=device)
    with torch.no_grad():
        results = torch.library.opcheck(
            torch.ops.cudnn_blocks.qk_norm_rope.default,
            tuple(problem.operands.values()),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )
    assert set(results.values()) == {"SUCCESS"}


def test_the_schema_names_its_mutations():
    arguments = torch.ops.cudnn_blocks.qk_norm_rope.default._schema.arguments
    written = {a.name for a in arguments if a.alias_info and a.alias_info.is_write}
    assert written == {"q", "k"}


def test_compiled_equals_eager_bit_for_bit(device):
    """Bands of one slab that was just computed, as in the block."""
    problem = make_qk((2, 5, 4, 2, 64), 16, device=device)

    def step(h, weight):
        slab = h @ weight
        q, k = slab[..., :256].unflatten(-1, (4, 64)), slab[..., 256:384].unflatten(-1, (2, 64))
        ops.qk_norm_rope(q, k, *list(problem.operands.values())[2:])
        return slab

    h, weight = (torch.randn(*of, device=device).to(BF16) for of in ((2, 5, 32), (32, 400)))
    torch._dynamo.reset()
    backend = {"cpu": "aot_eager", "cuda": "inductor"}[device.type]
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    assert_same_bits(compiled(h, weight), step(h, weight), "slab")


def test_no_stream_under_tracing():
    problem = make_qk()
    metas = {n: None if t is None else t.to("meta") for n, t in problem.operands.items()}
    with pytest.raises(NotServedError, match="current_stream under tracing is not served"):
        ops.qk_norm_rope(*metas.values(), current_stream=0)
    ops.qk_norm_rope(*metas.values())


def test_samples_may_be_specs_without_strides_of_a_slab():
    plan = spec_qk((2, 5, 4, 2, 64), 16, table_rows=8)
    assert isinstance(plan, QkNormRope)
    problem = make_qk((2, 5, 4, 2, 64), 16)
    samples = [TensorSpec.of(n, t) for n, t in problem.operands.items()]
    report = QkNormRope.probe(*samples, target="cpu")
    assert report.served
    assert "rope_dim=16, norm (eps 1e-06)" in QkNormRope(*samples).describe()
