# SPDX-License-Identifier: Apache-2.0
"""The torch.library ops of the Conv3D functions: schema, fakes, torch.compile, autograd (S09)."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_blocks import ContractError, GradModeError, NotServedError
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
from tests.helpers.conv3d_problem import make_problem
from tests.helpers.tensors import assert_same_bits

BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}
"""Inductor needs a C++ compiler on the CPU; on a GPU it brings its own."""
FORM_OPTIONS = [
    (RAW, {"zero_leading_frames": 1}),
    (NORM, {}),
    (NORM, {"residual": "add_biased"}),
    (NORM_PAD, {"residual": "add"}),
    (NORM_PAD, {"zero_leading_frames": 2}),
    (BIAS_PAD, {}),
    (NORM_ONLY, {"residual": "save_input", "history_frames": 1}),
    (NORM_ONLY, {"has_input_bias": True}),
    (CAUSAL, {}),
    (CAUSAL, {"history_frames": 2}),
]
forms = pytest.mark.parametrize(("kind", "options"), FORM_OPTIONS)


def library_op(kind):
    return getattr(torch.ops.cudnn_blocks, FORMS[kind].function.__name__).default


def library_arguments(problem):
    """Operands that are read, then knobs, by the schema's names."""
    values = {**problem.operands, **problem.knobs}
    if problem.kind == NORM_ONLY:
        values["save_input"] = problem.operands["residual_output"] is not None
    arguments = library_op(problem.kind)._schema.arguments
    return {argument.name: values[argument.name] for argument in arguments}


@pytest.mark.parametrize("kind", KINDS)
def test_the_schema_is_functional_and_names_the_arguments(kind):
    schema = library_op(kind)._schema
    assert not schema.is_mutable
    names = [argument.name for argument in schema.arguments]
    op = FORMS[kind].op
    read = [name for name in op.operand_names if name not in op.written_names]
    assert names[: len(read)] == read
    assert set(names[len(read) :]) <= {"history_frames", "zero_leading_frames", "save_input"}


@forms
def test_opcheck(device, kind, options):
    problem = make_problem(kind, (1, 3, 4, 5), device=device, **options)
    with torch.no_grad():
        results = torch.library.opcheck(
            library_op(kind),
            (),
            library_arguments(problem),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )
    assert set(results.values()) == {"SUCCESS"}


@forms
def test_compiled_equals_eager_bit_for_bit(device, kind, options):
    problem = make_problem(kind, device=device, **options)

    def step(x):
        results = problem.call(input=x * 2)
        return {name: None if t is None else t + 1 for name, t in results.items()}

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=BACKENDS[device.type])
    with torch.no_grad():
        eager, traced = step(problem["input"]), compiled(problem["input"])
    assert list(traced) == list(eager)
    for name, tensor in eager.items():
        if tensor is None:
            assert traced[name] is None
            continue
        assert traced[name].stride() == tensor.stride()
        # The wrapper leaves the history of padded tensors uninitialised; there is none here.
        assert_same_bits(traced[name], tensor, name)


def test_a_compiled_step_takes_chunks_of_other_lengths(device):
    problem = make_problem(CAUSAL, (1, 4, 4, 5), device=device)

    def step(chunk, weight, previous):
        return FORMS[CAUSAL].function(chunk, weight, previous)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=BACKENDS[device.type])
    clip, weight = problem["input"], problem["packed_weight"]
    whole = step(clip, weight, None)["output"]
    outputs, previous = [], None
    for chunk in clip.split([1, 2, 1], dim=2):
        results = compiled(chunk, weight, previous)
        outputs.append(results["output"])
        previous = results["cache_output"]
    assert_same_bits(torch.cat(outputs, 1), whole, "output")


@forms
def test_fakes_and_metas_have_the_real_shapes_and_strides(kind, options):
    problem = make_problem(kind, **options)
    real = problem.call()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {n: None if t is None else mode.from_tensor(t) for n, t in problem.operands.items()}
        fake = problem.with_(**fakes).call()
    metas = {n: None if t is None else t.to("meta") for n, t in problem.operands.items()}
    for other in (fake, problem.with_(**metas).call()):
        assert list(other) == list(real)
        for name, tensor in real.items():
            if tensor is None:
                assert other[name] is None
                continue
            facts = (tensor.shape, tensor.stride(), tensor.dtype)
            assert (other[name].shape, other[name].stride(), other[name].dtype) == facts


@pytest.mark.parametrize("as_parameter", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_autograd_is_declined_and_the_same_bits_come_without_it(device, kind, as_parameter):
    problem = make_problem(kind, device=device, residual="add", history_frames=0)
    expected = problem.call()
    read = [n for n, t in problem.operands.items() if t is not None and n not in problem.written]
    for name in read:
        leaf = problem[name].clone()
        leaf = torch.nn.Parameter(leaf) if as_parameter else leaf.requires_grad_()
        with pytest.raises(GradModeError, match=f"^{name}: requires grad.*autograd"):
            problem.call(**{name: leaf})
        with pytest.raises(GradModeError, match=f"^{name}: requires grad.*autograd"):
            library_op(kind)(**library_arguments(problem.with_(**{name: leaf})))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                results = problem.call(**{name: leaf})
            for key, tensor in results.items():
                if tensor is not None:
                    assert not tensor.requires_grad
                    assert_same_bits(tensor, expected[key], f"{key} with {name}")


@pytest.mark.parametrize("kind", KINDS)
def test_the_class_refuses_autograd_and_writes_nothing(device, kind):
    problem = make_problem(kind, device=device, residual="add")
    plan = problem.compiled()
    for name, tensor in problem.operands.items():
        if tensor is None:
            continue
        leaf = tensor.clone().requires_grad_()
        with pytest.raises(GradModeError, match=f"^{name}: requires grad while grad mode is on"):
            problem.execute(plan, **{name: leaf})
        assert all(bool(written.isnan().all()) for written in problem.written.values())
        with torch.no_grad():
            problem.clone().execute(plan, **{name: leaf})


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_under_tracing_declines(kind):
    problem = make_problem(kind)
    metas = {n: None if t is None else t.to("meta") for n, t in problem.operands.items()}
    with pytest.raises(NotServedError, match="current_stream under tracing is not served"):
        problem.with_(**metas).call(current_stream=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_op_judges_its_operands(device, kind):
    problem = make_problem(kind, device=device)
    arguments = library_arguments(problem)
    name = "gamma" if kind == NORM_ONLY else "packed_weight"
    with pytest.raises(ContractError, match=f"^{name}: expected"):
        library_op(kind)(**{**arguments, name: arguments[name][..., :-8]})


@pytest.mark.parametrize("kind", KINDS)
def test_torch_compile_does_not_swallow_a_refusal(device, kind):
    problem = make_problem(kind, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: problem.call(input=x), fullgraph=True, backend=BACKENDS[device.type]
    )
    with pytest.raises((ContractError, RuntimeError), match="input: expected"), torch.no_grad():
        compiled(problem["input"][:, :-1] if kind == CAUSAL else problem["input"].half())
