# SPDX-License-Identifier: Apache-2.0
"""``ops.gated_attention``: what it returns, its plans, its torch.library op."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_blocks import ContractError, GradModeError, NotServedError, ops
from cudnn_blocks.plan_cache import PLANS
from tests.helpers.gated_attention_problem import KNOBS, READ, SMALL, make_problem
from tests.helpers.tensors import assert_same_bits

BACKENDS = {"cpu": "aot_eager", "cuda": "inductor"}
"""Inductor needs a C++ compiler on the CPU; on a GPU it brings its own."""
OPTIONS = ("fuse_norm_rope", "fuse_gate")


def call(problem, **changes):
    """The functional form on a problem's operands; only ``current_stream`` is left out."""
    operands = {**problem.operands, **changes}
    return ops.gated_attention(
        *(operands[name] for name in READ),
        problem.geometry,
        seq_lens=operands["seq_lens"],
        return_lse=problem.operands["lse"] is not None,
        **{name: problem.knobs[name] for name in OPTIONS if name in problem.knobs},
    )


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def library_arguments(problem):
    geometry = dataclasses.asdict(problem.geometry)
    tensors = [problem.operands[name] for name in (*READ, "seq_lens")]
    has_lse = problem.operands["lse"] is not None
    return (*tensors, *geometry.values(), has_lse, *(problem.knobs[name] for name in OPTIONS))


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
@pytest.mark.parametrize("has_lse", [False, True])
def test_it_returns_what_the_block_writes(device, knobs, has_lse):
    problem = make_problem(SMALL, 2, 9, device=device, seq_lens=[4, 9], has_lse=has_lse, **knobs)
    result = call(problem)
    problem.run()
    out, *lse = result if has_lse else (result,)
    assert_same_bits(out, problem["out"], "out")
    assert out.is_contiguous()
    if has_lse:
        assert_same_bits(lse[0], problem["lse"], "lse")


def test_operands_that_the_geometry_has_no_use_for_are_none(device):
    for changes in ({"qk_norm": False}, {"rope_dim": 0}):
        problem = make_problem(dataclasses.replace(SMALL, **changes), device=device)
        assert_same_bits(call(problem), problem.run()["out"], "out")


def test_a_plan_for_every_geometry_shape_and_keyword():
    problem = make_problem(SMALL, 2, 4, seq_lens=[4, 4], **KNOBS[0])
    variants = [
        problem,
        problem.with_knobs(fuse_gate=True),
        problem.with_knobs(fuse_norm_rope=True),
        problem.with_(seq_lens=None),
        make_problem(SMALL, 2, 5, **KNOBS[0]),
        make_problem(SMALL, 1, 4, **KNOBS[0]),
        make_problem(SMALL, 2, 4, has_lse=True, **KNOBS[0]),
        make_problem(SMALL, 2, 4, dtype=torch.float16, **KNOBS[0]),
        make_problem(dataclasses.replace(SMALL, window_left=1), 2, 4, **KNOBS[0]),
        make_problem(dataclasses.replace(SMALL, attn_scale=0.5), 2, 4, **KNOBS[0]),
    ]
    results = [call(one) for one in variants]
    assert PLANS.stats().misses == len(variants)
    for one, first in zip(variants, results, strict=True):
        again = call(one)
        for a, b in zip(as_tuple(again), as_tuple(first), strict=True):
            assert_same_bits(a, b, "out")
    assert PLANS.stats().misses == len(variants)


def test_other_strides_find_the_plan():
    problem = make_problem(SMALL, 2, 4)
    expected = call(problem)
    wide = torch.zeros(2, 4, 256, dtype=torch.bfloat16)
    wide[..., :128] = problem["h"]
    assert_same_bits(call(problem, h=wide[..., :128]), expected, "out")
    assert PLANS.stats().misses == 1


@pytest.mark.parametrize(("batch", "tokens"), [(0, 4), (2, 0)])
def test_empty_calls(batch, tokens):
    out, lse = call(make_problem(SMALL, batch, tokens, table_rows=4, has_lse=True))
    assert out.shape == (batch, tokens, 128)
    assert lse.shape == (batch, 4, tokens)


def test_errors_are_the_blocks():
    problem = make_problem()
    with pytest.raises(ContractError, match=r"^w_o: expected shape \[128, 256\]"):
        call(problem, w_o=problem["w_qkvg"])
    with pytest.raises(ContractError, match="^cos: expected at least S = 8 rows, got 7"):
        call(problem, cos=problem["cos"][:, :7], sin=problem["sin"][:, :7])
    with pytest.raises(TypeError, match="^geometry: expected GatedAttentionGeometry"):
        ops.gated_attention(*(problem[name] for name in READ), {"d_model": 128})
    with pytest.raises(TypeError, match="^fuse_gate: expected bool, got int"):
        ops.gated_attention(*(problem[name] for name in READ), SMALL, fuse_gate=1)
    for name in READ:
        with pytest.raises((TypeError, ContractError), match=f"{name}: expected"):
            call(problem, **{name: None})
        with pytest.raises(TypeError, match=f"{name}: expected"):
            call(problem, **{name: "a tensor"})
    weight = problem["w_qkvg"].clone().requires_grad_()
    with pytest.raises(GradModeError, match="^w_qkvg: requires grad"):
        call(problem, w_qkvg=weight)
    with torch.no_grad():
        assert_same_bits(call(problem, w_qkvg=weight), call(problem), "out")


def test_the_schema_is_functional():
    schema = torch.ops.cudnn_blocks.gated_attention.default._schema
    assert not schema.is_mutable
    names = [argument.name for argument in schema.arguments]
    fields = [field.name for field in dataclasses.fields(SMALL)]
    blobs = ["h_sf", "w_qkvg_sf", "w_o_sf"]
    options = ["return_lse", *OPTIONS, "quant", "scales", *blobs]
    assert names == [*READ, "seq_lens", *fields, *options]


@pytest.mark.parametrize("has_options", [False, True])
def test_opcheck(device, has_options):
    knobs = KNOBS[-1] if has_options else KNOBS[0]
    options = {"seq_lens": [2, 4], "has_lse": True} if has_options else {}
    problem = make_problem(SMALL, 2, 4, device=device, **options, **knobs)
    with torch.no_grad():
        results = torch.library.opcheck(
            torch.ops.cudnn_blocks.gated_attention.default,
            library_arguments(problem),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("has_lse", [False, True])
def test_compiled_equals_eager_bit_for_bit(device, has_lse):
    problem = make_problem(SMALL, 2, 4, device=device, seq_lens=[2, 4], has_lse=has_lse, **KNOBS[0])

    def step(h):
        result = call(problem, h=h * 2)
        return as_tuple(result)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=BACKENDS[device.type])
    with torch.no_grad():
        for eager, traced in zip(step(problem["h"]), compiled(problem["h"]), strict=True):
            assert traced.stride() == eager.stride()
            assert_same_bits(traced, eager, "result")


def test_fakes_and_metas_have_the_real_shapes():
    problem = make_problem(SMALL, 2, 4, has_lse=True, **KNOBS[0])
    wide = torch.zeros(2, 4, 256, dtype=torch.bfloat16)[..., :128]
    problem = problem.with_(h=wide)
    real = call(problem)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = {n: None if t is None else mode.from_tensor(t) for n, t in problem.operands.items()}
        fake = call(problem.with_(**fakes))
    meta = call(problem.to("meta"))
    for a, b, c in zip(real, fake, meta, strict=True):
        assert a.shape == b.shape == c.shape
        assert a.stride() == b.stride() == c.stride()
        assert a.dtype == b.dtype == c.dtype


def test_a_stream_is_declined_under_tracing():
    problem = make_problem().to("meta")
    with pytest.raises(NotServedError, match="current_stream under tracing"):
        ops.gated_attention(*(problem[name] for name in READ), SMALL, current_stream=0)


def test_autograd_is_declined_by_the_library_op():
    problem = make_problem(**KNOBS[0])
    arguments = list(library_arguments(problem))
    arguments[0] = arguments[0].clone().requires_grad_()
    with pytest.raises(GradModeError, match="^h: requires grad; gated_attention has no autograd"):
        torch.ops.cudnn_blocks.gated_attention(*arguments)
