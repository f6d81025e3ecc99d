# SPDX-License-Identifier: Apache-2.0
"""SigmoidGate and its functional form on the reference engine: results, refusals, tracing."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import ContractError, GradModeError, NotServedError, ops
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.target import TARGET_NAMES
from tests.helpers.pointwise_problem import DTYPES, make_gate, spec_gate
from tests.helpers.tensors import assert_same_bits, clone_exact

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 5, 4, 64), (1, 1, 1, 8), (3, 7, 5, 40)])
def test_plan_and_function_follow_the_reference(dtype, shape):
    problem = make_gate(shape, dtype=dtype)
    expected, before = problem.expected(), clone_exact(problem["o"])
    assert_same_bits(problem.run()["out"], expected, "out")
    out = ops.sigmoid_gate(problem["o"], problem["gate"])
    assert out.is_contiguous()
    assert_same_bits(out, expected, "out")
    assert_same_bits(problem["o"], before, "o")


def test_in_place():
    problem = make_gate(in_place=True)
    expected = problem.expected()
    assert problem.run()["o"] is problem["out"]
    assert_same_bits(problem["o"], expected, "o")


def test_gates_of_single_heads():
    """S20: a closed head gives 0, a head at 0 passes half; SiLU would give 0 there."""
    o = torch.randn(1, 3, 2, 8).to(BF16)
    gate = torch.zeros_like(o)
    gate[:, :, 0] = -100
    out = ops.sigmoid_gate(o, gate)
    assert not out[:, :, 0].any()
    assert torch.equal(out[:, :, 1], 0.5 * o[:, :, 1])


def test_a_plan_serves_smaller_extents():
    plan = make_gate((3, 8, 4, 64)).plan()
    plan.compile()
    for shape in ((3, 8, 4, 64), (1, 1, 4, 64), (2, 7, 4, 64)):
        problem = make_gate(shape)
        assert_same_bits(problem.run(plan)["out"], problem.expected(), "out")
    with pytest.raises(ContractError, match="S: expected at most 8, the sample's, got 9"):
        make_gate((1, 9, 4, 64)).run(plan)


@pytest.mark.parametrize("shape", [(0, 5, 4, 64), (2, 0, 4, 64)])
def test_an_empty_call(shape):
    problem = make_gate(shape).run()
    assert ops.sigmoid_gate(problem["o"], problem["gate"]).shape == shape


def zeros(*shape):
    return torch.zeros(shape, dtype=BF16)


BAD = [
    ({"o": zeros(2, 5, 256)}, r"^o: expected shape \[B, S, h_q, D\], got \[2, 5, 256\]"),
    ({"gate": zeros(2, 5, 256)}, r"^gate: expected shape \[B = 2, S = 5, 4, 64\]"),
    ({"gate": zeros(2, 5, 2, 64)}, r"^gate: expected shape \[B = 2, S = 5, 4, 64\]"),
    ({"gate": zeros(2, 5, 4, 68)[..., :64]}, r"^gate: expected strides .* multiples of 8"),
    ({"out": zeros(2, 5, 4, 128)[..., ::2]}, r"^out: expected strides"),
    ({"out": zeros(1, 5, 4, 64).expand(2, 5, 4, 64)}, "^out: .* keep all elements apart"),
]


@pytest.mark.parametrize(("changes", "match"), BAD)
def test_a_bad_sample_or_operand(changes, match):
    problem = make_gate()
    with pytest.raises(ContractError, match=match):
        problem.with_(**changes).plan().check_support()
    plan = problem.plan()
    plan.compile()
    with pytest.raises(ContractError):
        problem.with_(**changes).run(plan)
    if "out" not in changes:
        bad = problem.with_(**changes)
        with pytest.raises(ContractError):
            ops.sigmoid_gate(bad["o"], bad["gate"])


def test_a_part_of_another_operand_is_refused():
    memory = torch.randn(2, 6, 4, 64).to(BF16)
    problem = make_gate((2, 5, 4, 64)).with_(o=memory[:, :5], out=memory[:, 1:])
    with pytest.raises(ContractError, match="^out: .* apart from o, got overlapping"):
        problem.run()
    problem = make_gate().with_(out=make_gate()["gate"])
    with pytest.raises(ContractError, match="^out: .* apart from gate, got overlapping"):
        problem.with_(gate=problem["out"]).run()


def test_out_may_be_another_band_of_the_gates_slab():
    problem = make_gate((2, 5, 4, 64))
    slab = problem["gate"]._base
    out = slab[..., :256].unflatten(-1, (4, 64))
    expected, gate = problem.expected(), clone_exact(problem["gate"])
    assert_same_bits(problem.with_(out=out).run()["out"], expected, "out")
    assert_same_bits(problem["gate"], gate, "gate")


def test_dtypes_and_types():
    with pytest.raises(ContractError, match=r"^o: expected dtype torch\.bfloat16 or"):
        spec_gate(dtype=torch.float32, target="sm_90a").check_support()
    problem = make_gate()
    with pytest.raises(ContractError, match="^gate: expected dtype torch.bfloat16"):
        problem.with_(gate=problem["gate"].half()).plan().check_support()
    for name in ("o", "gate"):
        with pytest.raises(TypeError, match=f"^{name}: expected "):
            ops.sigmoid_gate(**{"o": problem["o"], "gate": problem["gate"], name: None})


@pytest.mark.parametrize("target", TARGET_NAMES)
@pytest.mark.parametrize("d_head", [4, 12, 520])
def test_head_sizes_that_no_engine_serves(d_head, target):
    match = rf"d_head={d_head} \(served: multiples of 8 up to 512\)"
    with pytest.raises(NotServedError, match=match):
        spec_gate((2, 5, 4, d_head), target=target).check_support()


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_what_is_served(target):
    engine = "reference" if target == "cpu" else "portable"
    shapes = [(2, 5, 3, d_head) for d_head in range(8, 513, 8)]
    for shape in (*shapes, (2**20, 2**20, 16, 256)):
        for dtype in DTYPES:
            report = spec_gate(shape, dtype=dtype, target=target).probe()
            assert report.served, report.decline
            assert [stage.engine for stage in report.stages] == [engine]


def test_batches_that_the_kernel_cannot_number():
    shape = (1, 2**24, 16, 64)
    with pytest.raises(NotServedError, match=rf"batch_vecs={2**31} \(served: up to "):
        spec_gate(shape, target="sm_90a").check_support()
    assert spec_gate(shape, target="cpu").probe().served


def test_pins():
    assert spec_gate(target="sm_90a", engines={"sigmoid_gate": "portable"}).probe().served
    for engine, target in (("reference", "sm_90a"), ("portable", "cpu")):
        with pytest.raises(NotServedError, match=f"{engine}: target={target} "):
            spec_gate(target=target, engines={"sigmoid_gate": engine}).check_support()


def test_one_functional_plan_for_every_batch_length_and_stride():
    for shape in ((2, 5, 4, 64), (1, 90, 4, 64), (7, 1, 4, 64)):
        problem = make_gate(shape)
        out = ops.sigmoid_gate(problem["o"], problem["gate"])
        assert_same_bits(out, problem.expected(), "out")
    assert PLANS.stats().size == 1


def test_grad_mode():
    problem = make_gate()
    with pytest.raises(GradModeError, match="^o: requires grad"):
        ops.sigmoid_gate(problem["o"].requires_grad_(), problem["gate"])


def test_opcheck_and_compile(device):
    problem = make_gate(device=device)
    arguments = (problem["o"], problem["gate"])
    with torch.no_grad():
        results = torch.library.opcheck(
            torch.ops.cudnn_blocks.sigmoid_gate.default,
            arguments,
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )
    assert set(results.values()) == {"SUCCESS"}
    assert not torch.ops.cudnn_blocks.sigmoid_gate.default._schema.is_mutable
    torch._dynamo.reset()
    backend = {"cpu": "aot_eager", "cuda": "inductor"}[device.type]
    compiled = torch.compile(ops.sigmoid_gate, fullgraph=True, backend=backend)
    assert_same_bits(compiled(*arguments), ops.sigmoid_gate(*arguments), "out")
