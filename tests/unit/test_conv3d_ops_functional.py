# SPDX-License-Identifier: Apache-2.0
"""The Conv3D functions in eager mode: results, keys, the plan cache, arguments of a wrong kind."""

from __future__ import annotations

import inspect

import pytest
import torch

from cudnn_blocks import ContractError, NotServedError, ops
from cudnn_blocks.ops.allocate import run_on_stream
from cudnn_blocks.plan_cache import PLANS
from tests.helpers.conv3d_forms import (
    BIAS_PAD,
    CAUSAL,
    FORMS,
    KINDS,
    NORM,
    NORM_ONLY,
    NORM_PAD,
    RAW,
)
from tests.helpers.conv3d_problem import assert_exact, make_problem
from tests.helpers.tensors import assert_same_bits, poison_allocator

KEYS = {
    NORM: ["output", "residual_output"],
    NORM_PAD: ["padded_output", "cache_output", "residual_output"],
    BIAS_PAD: ["padded_output"],
    NORM_ONLY: ["padded_output", "cache_output", "residual_output"],
    CAUSAL: ["output", "cache_output"],
}
PARAMETERS = {
    RAW: ["input", "packed_weight", "current_stream", "zero_leading_frames"],
    NORM: [
        *("input", "packed_weight", "bias", "gamma", "residual", "residual_bias"),
        *("current_stream", "zero_leading_frames"),
    ],
    NORM_PAD: [
        *("input", "packed_weight", "bias", "gamma", "history_frames", "residual"),
        *("residual_bias", "current_stream", "zero_leading_frames"),
    ],
    BIAS_PAD: [
        *("input", "packed_weight", "bias", "residual", "residual_bias"),
        *("current_stream", "zero_leading_frames"),
    ],
    NORM_ONLY: [
        *("input", "gamma", "input_bias", "previous", "residual", "residual_bias"),
        *("current_stream", "save_input"),
    ],
    CAUSAL: ["input", "packed_weight", "previous", "current_stream"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_signatures(kind):
    signature = inspect.signature(FORMS[kind].function)
    assert list(signature.parameters) == PARAMETERS[kind]
    keyword_only = {"zero_leading_frames", "save_input"}
    for name, parameter in signature.parameters.items():
        is_keyword = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert is_keyword == (name in keyword_only), name
    assert signature.parameters["current_stream"].default is None


@pytest.mark.parametrize("residual", ["none", "add", "add_biased"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_keys_and_fresh_memory(device, kind, residual):
    problem = make_problem(kind, device=device, residual=residual)
    for tensor in problem.written.values():
        poison_allocator(tuple(tensor.shape), torch.bfloat16, device)
    results = problem.call()
    if kind != RAW:
        assert type(results) is dict
        assert list(results) == KEYS[kind]
    expected = problem.run().written
    expected.pop("padded_input", None)
    for name, tensor in results.items():
        assert (tensor is None) == (name not in expected), name
        if tensor is not None:
            assert tensor.is_contiguous()
            assert_same_bits(tensor, expected[name], name)


def test_raw_is_a_tensor():
    assert isinstance(make_problem(RAW).forms.function(*_inputs(make_problem(RAW))), torch.Tensor)


def _inputs(problem):
    return [problem["input"], problem["packed_weight"]]


@pytest.mark.parametrize("has_input_bias", [False, True])
def test_save_input_keeps_the_value_without_a_residual(device, has_input_bias):
    problem = make_problem(
        NORM_ONLY, device=device, residual="save_input", has_input_bias=has_input_bias
    )
    results = problem.call()
    assert_exact({n: t for n, t in results.items() if t is not None}, problem.run().written)
    plain = ops.rmsnorm_silu_pad(problem["input"], problem["gamma"], problem.operands["input_bias"])
    assert plain["residual_output"] is None
    assert_same_bits(plain["padded_output"], results["padded_output"], "padded_output")
    if not has_input_bias:
        assert_same_bits(results["residual_output"], problem["input"], "residual_output")


@pytest.mark.parametrize("residual", ["add", "add_biased"])
def test_save_input_beside_a_residual_changes_nothing(residual):
    problem = make_problem(NORM_ONLY, residual=residual)
    plain, saved = problem.call(), problem.call(save_input=True)
    for name in KEYS[NORM_ONLY]:
        assert_same_bits(saved[name], plain[name], name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_call_finds_the_plan(kind):
    problem = make_problem(kind)
    for _ in range(3):
        problem.call()
    assert (PLANS.stats().misses, PLANS.stats().hits) == (1, 2)


def test_129_shapes_then_the_first_again():
    """S22: an evicted plan is made anew and gives the same bits."""
    problem = make_problem(RAW, (1, 1, 1, 1), (8, 8))
    first = problem.call()["output"]
    for width in range(2, 130):
        make_problem(RAW, (1, 1, 1, width), (8, 8)).call()
    assert PLANS.stats().evictions == 1
    assert_same_bits(problem.call()["output"], first, "output")
    assert PLANS.stats().misses == 130


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_history_frames_are_part_of_the_key(order):
    """S22: equal shapes, other facts."""
    problems = [make_problem(NORM_PAD, (1, 3, 4, 5), history_frames=p) for p in range(3)]
    for p in order:
        shape = problems[p]["padded_output"].shape
        poison_allocator(tuple(shape), torch.bfloat16, torch.device("cpu"))
        padded = problems[p].call()["padded_output"]
        expected = problems[p].expected()["padded_output"]
        assert not padded[:, : 2 - p].any()
        assert_same_bits(padded[:, 2:], expected[:, 2:], f"P={p}")
    assert PLANS.stats().size == 3


def test_residual_and_hint_are_part_of_the_key():
    """S22: on and off, in both orders."""
    with_, without = make_problem(NORM, residual="add"), make_problem(NORM)
    hinted = without.with_knobs(zero_leading_frames=1)
    for problem in (with_, without, hinted, without, with_):
        expected = problem.expected()
        results = problem.call()
        assert_exact({n: t for n, t in results.items() if t is not None}, expected)
    assert PLANS.stats().size == 3


def test_frames_of_the_history_are_part_of_the_key():
    for kind in (NORM_ONLY, CAUSAL):
        for history in (2, 1, 0, 2):
            problem = make_problem(kind, (1, 3, 4, 5), history_frames=history)
            expected = problem.expected()
            for name, tensor in problem.call().items():
                if tensor is not None:
                    assert_same_bits(tensor, expected[name], f"{kind} P={history} {name}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_is_refused_leaves_no_plan(kind):
    problem = make_problem(kind)
    name = "packed_weight" if kind != NORM_ONLY else "gamma"
    with pytest.raises(ContractError, match=f"^{name}: expected"):
        problem.call(**{name: problem[name][..., :-8]})
    assert PLANS.stats().size == 0


@pytest.mark.parametrize("kind", KINDS)
def test_another_dtype_is_refused_warm_and_cold(kind):
    problem = make_problem(kind)
    for _ in range(2):
        with pytest.raises(ContractError, match="^input: expected dtype torch.bfloat16"):
            problem.call(input=problem["input"].half())
        problem.call()


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_of_a_wrong_type(kind):
    problem = make_problem(kind, residual="add")
    tensors = [n for n, t in problem.operands.items() if t is not None]
    for name in tensors:
        if name not in problem.forms.op.written_names:
            with pytest.raises(TypeError, match=f"^{name}: expected Tensor, got list"):
                problem.call(**{name: [1.0]})
    for name in problem.forms.op.required_names - problem.forms.op.written_names - {"input"}:
        with pytest.raises(TypeError, match=f"^{name}: expected Tensor, got NoneType"):
            problem.call(**{name: None})
    for knob in problem.knobs:
        problem.call()  # True must not be found under the key of 1
        with pytest.raises(TypeError, match=f"^{knob}: expected int, got bool"):
            problem.call(**{knob: True})
    assert PLANS.stats().size == (1 if problem.knobs else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_knobs_out_of_range(kind):
    problem = make_problem(kind)
    for knob in problem.knobs:
        for value in (-1, 3):
            with pytest.raises(ContractError, match=f"^{knob}: expected 0 to 2, got {value}"):
                problem.call(**{knob: value})
            with pytest.raises(ContractError, match=f"^{knob}: expected 0 to 2, got {value}"):
                problem.with_knobs(**{knob: value}).plan().check_support()
        with pytest.raises(TypeError, match=f"^{knob}: expected int, got str"):
            problem.with_knobs(**{knob: "1"}).plan()
    with pytest.raises(TypeError, match="^save_input: expected bool, got int"):
        ops.rmsnorm_silu_pad(torch.zeros(1), torch.zeros(1), save_input=1)


def test_a_residual_bias_needs_a_residual():
    for kind in (NORM, NORM_PAD, NORM_ONLY):
        problem = make_problem(kind)
        bias = torch.zeros(24, dtype=torch.bfloat16)
        with pytest.raises(ContractError, match="^residual_bias: expected None without a residual"):
            problem.call(residual_bias=bias)


def test_too_many_channels_to_fuse_a_norm_says_what_to_run_instead():
    for kind in (NORM, NORM_PAD):
        with pytest.raises(NotServedError, match="Conv3dRaw, then RmsNormSiluPad"):
            make_problem(kind, (1, 1, 1, 1), (8, 328)).call()


def test_the_separate_norm_gives_what_the_fused_one_would():
    """The way around a decline: the convolution, then the norm with the deferred bias."""
    problem = make_problem(NORM_PAD, residual="add_biased")
    raw = ops.conv3d_raw(problem["input"], problem["packed_weight"])
    separate = ops.rmsnorm_silu_pad(
        raw,
        problem["gamma"],
        problem["bias"],
        residual=problem["residual"],
        residual_bias=problem["residual_bias"],
    )
    fused = problem.call()
    for name in KEYS[NORM_PAD]:
        assert_same_bits(separate[name], fused[name], name)


def test_on_the_cpu_a_stream_is_passed_over():
    problem = make_problem(CAUSAL)
    assert_same_bits(problem.call(current_stream=7)["output"], problem.call()["output"], "output")


def test_run_on_stream_hands_out_what_it_was_given():
    x = torch.zeros(2)
    assert run_on_stream(x, 5, lambda stream: [x, torch.full((1,), float(stream is None))])[1] == 1
