# SPDX-License-Identifier: Apache-2.0
"""The six Conv3D classes on the reference engine: results, extents, workspace, empty batch."""

from __future__ import annotations

import itertools

import pytest
import torch

from cudnn_blocks import ContractError, LifecycleError
from cudnn_blocks.workspace import GuardedBuffer
from tests.helpers.conv3d_forms import CAUSAL, CONV_KINDS, KINDS, NORM, NORM_ONLY, NORM_PAD, RAW
from tests.helpers.conv3d_problem import assert_exact, make_problem
from tests.helpers.tensors import assert_same_bits

RESIDUALS = ("none", "add", "add_biased")
MODES = [
    *((RAW, {"zero_leading_frames": hint}) for hint in (0, 2)),
    *((NORM, {"residual": r, "zero_leading_frames": 1}) for r in RESIDUALS),
    *(
        (NORM_PAD, {"residual": r, "history_frames": p})
        for r, p in itertools.product(RESIDUALS, range(3))
    ),
    *(("bias_residual_pad", {"residual": r}) for r in RESIDUALS[1:]),
    *(
        (NORM_ONLY, {"residual": r, "history_frames": p, "has_input_bias": bias})
        for r, p, bias in [
            ("none", 0, False),
            ("save_input", 1, False),
            ("save_input", 0, True),
            ("add", 2, True),
            ("add_biased", 1, True),
        ]
    ),
    *((CAUSAL, {"history_frames": p, "has_padded_input": own}) for p in range(3) for own in (0, 1)),
]


@pytest.mark.parametrize(("kind", "options"), MODES)
def test_the_class_gives_what_the_reference_gives(kind, options):
    problem = make_problem(kind, **options)
    before, expected = problem.clone(), problem.expected()
    problem.run()
    assert_exact(problem.written, expected)
    for name, tensor in problem.operands.items():
        if tensor is not None and name not in problem.written:
            assert_same_bits(tensor, before[name], name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sites", [(1, 1, 1, 1), (1, 2, 4, 5), (2, 3, 1, 3), (2, 1, 4, 1)])
def test_a_plan_takes_smaller_extents_than_its_samples(kind, sites):
    plan = make_problem(kind).compiled()
    residual = "none" if kind != "bias_residual_pad" else "add"
    problem = make_problem(kind, sites, residual=residual)
    expected = problem.expected()
    problem.execute(plan)
    assert_exact(problem.written, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("symbol", "axis"), [("N", 0), ("T", 1), ("H", 2), ("W", 3)])
def test_larger_than_the_sample_is_refused(kind, symbol, axis):
    sites = [2, 3, 4, 5]
    plan = make_problem(kind, tuple(sites)).compiled()
    sites[axis] += 1
    problem = make_problem(kind, tuple(sites))
    with pytest.raises(ContractError, match=f"^{symbol}: expected at most ., the sample's, got"):
        problem.execute(plan)
    assert all(bool(tensor.isnan().all()) for tensor in problem.written.values())


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_is_an_empty_result(kind):
    plan = make_problem(kind).compiled()
    empty = make_problem(kind, (0, 3, 4, 5))
    empty.execute(plan)  # S29
    results = empty.call()
    assert all(tensor.shape[0] == 0 for tensor in results.values() if tensor is not None)
    assert make_problem(kind, (0, 3, 4, 5)).plan().check_support()


@pytest.mark.parametrize("kind", KINDS)
def test_the_call_compiles_where_execute_does_not(kind):
    problem = make_problem(kind)
    plan = problem.plan()
    with pytest.raises(LifecycleError, match=r"execute\(\) before compile\(\)"):
        problem.execute(plan)
    expected = problem.expected()
    plan(**problem.operands, **problem.workspace(plan))
    assert_exact(problem.written, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_positional_operands_have_the_stated_order(kind):
    problem = make_problem(kind)
    expected, plan = problem.expected(), problem.compiled()
    plan.execute(*problem.operands.values(), None)  # the last is current_stream
    assert_exact(problem.written, expected)


def test_history_frames_is_the_seventh_argument():
    problem = make_problem(NORM_PAD, history_frames=2, residual="add_biased")
    first, rest = list(problem.operands.values())[:6], list(problem.operands.values())[6:]
    plan = problem.forms.op(*first, 2, *rest)
    plan.compile()
    expected = problem.expected()
    problem.execute(plan)
    assert_exact(problem.written, expected)
    assert problem["padded_output"][:, :2, 1:-1, 1:-1].isnan().all()


@pytest.mark.parametrize("history_frames", range(3))
def test_padded_input_from_the_workspace_equals_an_explicit_one(history_frames):
    own = make_problem(CAUSAL, history_frames=history_frames)
    carved = own.clone().with_(padded_input=None)
    plan, other = carved.compiled(), own.compiled()
    assert plan.get_workspace_size() == -(-own["padded_input"].numel() * 2 // 256) * 256
    assert other.get_workspace_size() == 0
    own.execute(other)
    workspace = carved.workspace(plan)
    carved.execute(plan, **workspace)
    assert_exact(carved.written, {n: own[n] for n in ("output", "cache_output")})
    size_bytes = own["padded_input"].numel() * 2
    shown = workspace["workspace"][:size_bytes].view(torch.bfloat16)
    assert_same_bits(shown.view(own["padded_input"].shape), own["padded_input"], "padded_input")


def test_the_workspace_is_exact_and_guarded():
    """S28: the size that is asked for is the size that is used."""
    problem = make_problem(CAUSAL, has_padded_input=False)
    plan, expected = problem.compiled(), problem.clone().run().written
    assert str(plan._layout).endswith("padded_input")
    buffer = GuardedBuffer(plan.get_workspace_size() + 256, "cpu")
    start = -buffer.bytes.data_ptr() % 256
    inner = buffer.bytes[start : start + plan.get_workspace_size()]
    problem.execute(plan, workspace=inner)
    assert buffer.is_intact()
    assert_exact(problem.written, expected)


@pytest.mark.parametrize("case", ["absent", "short", "misaligned", "overlapping"])
def test_a_bad_workspace_is_refused(case):
    problem = make_problem(CAUSAL, has_padded_input=False)
    plan = problem.compiled()
    size_bytes = plan.get_workspace_size()
    good = problem.workspace(plan)["workspace"]
    raw = torch.zeros(size_bytes + 512, dtype=torch.uint8)
    bad = {
        "absent": None,
        "short": good[:-1],
        "misaligned": raw[-raw.data_ptr() % 256 + 16 :],
        "overlapping": raw[-raw.data_ptr() % 256 :],
    }[case]
    changes = {}
    if case == "overlapping":
        shape = problem["cache_output"].shape
        inside = bad[: problem["cache_output"].numel() * 2].view(torch.bfloat16)
        changes["cache_output"] = inside.view(shape).fill_(torch.nan)
    problem = problem.with_(**changes)
    with pytest.raises(ContractError, match="^workspace: expected"):
        problem.execute(plan, workspace=bad)
    assert all(bool(tensor.isnan().all()) for tensor in problem.written.values())


@pytest.mark.parametrize("kind", KINDS)
def test_describe_names_stages_and_engines(kind):
    text = (
        make_problem(kind, has_padded_input=False).plan().describe()
        if kind == CAUSAL
        else (make_problem(kind).plan().describe())
    )
    stages = {
        NORM_ONLY: ["rmsnorm_silu_pad"],
        CAUSAL: ["causal_pack", "causal_conv3d"],
    }.get(kind, ["conv3d"])
    for stage in stages:
        assert f"{stage}: reference (run: tests/unit/" in text
    assert "allocates" in text
    assert ("padded_input" in text) == (kind == CAUSAL)


@pytest.mark.parametrize("kind", CONV_KINDS)
def test_a_hint_equals_true_zeros_and_reads_nothing(kind):
    for hint in (1, 2):
        problem = make_problem(kind, zero_leading_frames=hint)
        problem["input"][:, :hint] = torch.nan
        zeroed = problem.clone().with_knobs(zero_leading_frames=0)
        zeroed["input"][:, :hint] = 0
        assert_exact(problem.run().written, zeroed.run().written)
