# SPDX-License-Identifier: Apache-2.0
"""The torch.library op: schema, fakes, torch.compile, autograd (S08, S09)."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_blocks import ContractError, GradModeError, NotServedError, ops
from tests.helpers.conv1d_problem import make_problem
from tests.helpers.tensors import assert_same_bits, clone_exact

BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}
"""Inductor needs a C++ compiler on the CPU; on a GPU it brings its own."""


def library_op(*args, **kwargs):
    return torch.ops.cudnn_blocks.causal_conv1d_update(*args, **kwargs)


def test_the_schema_declares_the_mutation():
    schema = torch.ops.cudnn_blocks.causal_conv1d_update.default._schema
    assert schema.is_mutable
    written = [arg.name for arg in schema.arguments if arg.alias_info and arg.alias_info.is_write]
    assert written == ["conv_state"]


@pytest.mark.parametrize("has_options", [False, True])
@pytest.mark.parametrize("pitch", [8, 16])
def test_opcheck(device, has_options, pitch):
    problem = make_problem(
        *(2, 8),
        device=device,
        pitch=pitch,
        has_bias=has_options,
        indices=[1, -1] if has_options else None,
    )
    results = torch.library.opcheck(
        torch.ops.cudnn_blocks.causal_conv1d_update.default,
        (problem.x, problem.conv_state, problem.weight, problem.bias, "silu"),
        {"conv_state_indices": problem.indices},
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("layout", ["compact", "channel_last"])
@pytest.mark.parametrize("has_options", [False, True])
@pytest.mark.parametrize("pitch", [8, 16])
def test_compiled_equals_eager_bit_for_bit(device, layout, has_options, pitch):
    problem = make_problem(
        *(2, 8, 4, 3, layout),
        device=device,
        pitch=pitch,
        has_bias=has_options,
        indices=[2, -1] if has_options else None,
    )

    def step(x, state, weight, bias, indices):
        y = ops.causal_conv1d_update(x, state, weight, bias, "silu", conv_state_indices=indices)
        return y, state.clone()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=BACKENDS[device.type])
    eager_state, compiled_state = clone_exact(problem.conv_state), clone_exact(problem.conv_state)
    others = (problem.weight, problem.bias, problem.indices)
    with torch.no_grad():
        for _ in range(3):  # the state goes on from call to call
            eager_y, eager_seen = step(problem.x, eager_state, *others)
            y, seen = compiled(problem.x, compiled_state, *others)
            assert_same_bits(y, eager_y, "y")
            assert_same_bits(seen, eager_seen, "the state as the graph sees it")
            assert_same_bits(compiled_state, eager_state, "the state")
            assert y.stride() == eager_y.stride() == (8, 1)


def test_the_update_survives_when_only_the_state_is_used(device):
    """A schema without the mutation lets a compiler drop the call."""
    problem = make_problem(2, 8, device=device)

    def step(x, state, weight):
        ops.causal_conv1d_update(x, state, weight)
        return x + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=BACKENDS[device.type])
    expected = clone_exact(problem.conv_state)
    with torch.no_grad():
        step(problem.x, expected, problem.weight)
        compiled(problem.x, problem.conv_state, problem.weight)
    assert_same_bits(problem.conv_state, expected, "state")


@pytest.mark.parametrize("pitch", [8, 16])
def test_fake_strides_are_the_real_ones(pitch):
    problem = make_problem(2, 8, pitch=pitch)
    real = ops.causal_conv1d_update(problem.x, problem.conv_state, problem.weight)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) for t in (problem.x, problem.conv_state, problem.weight)]
        fake = ops.causal_conv1d_update(*fakes)
    for out in (real, fake):
        assert (out.shape, out.stride(), out.dtype) == ((2, 8), (8, 1), torch.bfloat16)


def test_meta_tensors_go_through_the_library_op():
    problem = make_problem(2, 8)
    metas = [t.to("meta") for t in (problem.x, problem.conv_state, problem.weight)]
    out = ops.causal_conv1d_update(*metas)
    assert (out.device.type, out.shape, out.dtype) == ("meta", (2, 8), torch.bfloat16)


@pytest.mark.parametrize("call", [ops.causal_conv1d_update, library_op], ids=["eager", "library"])
@pytest.mark.parametrize("name", ["x", "conv_state", "weight", "bias"])
@pytest.mark.parametrize("as_parameter", [False, True])
def test_autograd_is_declined_and_the_same_bits_come_without_it(device, call, name, as_parameter):
    problem = make_problem(2, 8, device=device, has_bias=True)
    names = ("x", "conv_state", "weight", "bias")
    plain = {n: clone_exact(problem.operands[n]) for n in names}
    expected = ops.causal_conv1d_update(*plain.values(), "silu")

    def operands():
        chosen = {n: clone_exact(problem.operands[n]) for n in names}
        leaf = chosen[name]
        chosen[name] = torch.nn.Parameter(leaf) if as_parameter else leaf.requires_grad_()
        return chosen

    refused = operands()
    with pytest.raises(GradModeError, match=f"^{name}: requires grad.*autograd"):
        call(*refused.values(), "silu")
    for n in names:
        assert_same_bits(refused[n].detach(), problem.operands[n], n)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            given = operands()
            y = call(*given.values(), "silu")
            assert not y.requires_grad
            assert_same_bits(y, expected, f"y under {mode.__name__}")
            assert_same_bits(given["conv_state"], plain["conv_state"], "state")


def test_a_parameter_as_weight_in_grad_mode_off_takes_the_same_plan(device):
    problem = make_problem(2, 8, device=device)
    weight = torch.nn.Parameter(clone_exact(problem.weight))
    states = [clone_exact(problem.conv_state) for _ in range(2)]
    with torch.no_grad():
        ys = [
            ops.causal_conv1d_update(problem.x, state, w)
            for state, w in zip(states, (weight, problem.weight), strict=True)
        ]
    assert_same_bits(ys[0], ys[1], "y")


def test_a_stream_under_tracing_declines():
    x = torch.empty(2, 8, device="meta", dtype=torch.bfloat16)
    state = torch.empty(2, 8, 4, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(8, 4, device="meta", dtype=torch.bfloat16)
    with pytest.raises(NotServedError, match="current_stream under tracing is not served"):
        ops.causal_conv1d_update(x, state, weight, current_stream=0)


def test_the_library_op_judges_its_operands(device):
    problem = make_problem(2, 8, device=device)
    with pytest.raises(ContractError, match="^conv_state: expected"):
        library_op(problem.x, problem.conv_state[:, :, :3], problem.weight)


def test_torch_compile_does_not_swallow_a_refusal(device):
    problem = make_problem(2, 8, device=device)
    torch._dynamo.reset()
    compiled = torch.compile(
        ops.causal_conv1d_update, fullgraph=True, backend=BACKENDS[device.type]
    )
    with pytest.raises((ContractError, RuntimeError), match="activation"), torch.no_grad():
        compiled(problem.x, problem.conv_state, problem.weight, None, "gelu")
