# SPDX-License-Identifier: Apache-2.0
"""``ops.gated_attention`` and the command line in the precision modes."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from click.testing import CliRunner

from cudnn_blocks import ContractError, ops
from cudnn_blocks.cli import main
from cudnn_blocks.ops.gated_attention_functional import _read, _spell
from cudnn_blocks.plan_cache import PLANS
from tests.helpers.gated_attention_precision import BLOBS, D128, MODES, make_precision_problem
from tests.helpers.gated_attention_problem import READ
from tests.helpers.tensors import assert_same_bits

TENSORS = (*READ, "seq_lens", *BLOBS)


def make(name: str, **options):
    torch.manual_seed(6)
    return make_precision_problem(MODES[name], D128, 2, 9, **options)


def call(problem, **changes):
    tensors = {n: problem.operands[n] for n in TENSORS if n in problem.operands}
    given = {**tensors, "quant": problem.quant, **problem.mode.knobs, **changes}
    return ops.gated_attention(**given, geometry=problem.geometry)


@pytest.mark.parametrize("name", MODES)
def test_it_is_the_block(name):
    problem = make(name, seq_lens=[9, 4], has_lse=True)
    out, lse = call(problem, return_lse=True)
    planned = problem.clone().run()
    assert_same_bits(out, planned["out"], "out")
    assert_same_bits(lse, planned["lse"], "lse")


def test_plans_are_shared_by_everything_but_values():
    problem = make("fp8")
    PLANS.clear()
    call(problem)
    call(problem.with_(h=problem["h"].clone()))
    assert PLANS.stats().size == 1
    other = dataclasses.replace(problem, quant=dataclasses.replace(problem.quant, scale_q=20.0))
    assert_same_bits(call(other), other.clone().run()["out"], "with another scale")
    assert PLANS.stats().size == 2


@pytest.mark.parametrize("name", ["fp8-fused", "mxfp4-weights", "nvfp4-output"])
def test_the_library_op_is_the_function(name):
    """Through the dispatcher, and its shape and dtype without memory."""
    problem = make(name)
    compiled = torch.compile(lambda: call(problem), fullgraph=True, backend="eager")
    assert_same_bits(compiled(), call(problem), "out")
    meta = call(problem.to("meta"))
    assert (meta.shape, meta.dtype) == (problem["out"].shape, torch.bfloat16)


@pytest.mark.parametrize("name", MODES)
def test_a_spec_survives_its_spelling(name):
    quant = make(name).quant
    for fast in (False, True):
        spec = dataclasses.replace(quant, fast_accumulation=fast)
        assert _read(*_spell(spec)) == spec
    assert _read(*_spell(None)) is None


@pytest.mark.parametrize("name", ["fp8", "fp8-fused", "mxfp8"])
def test_fast_accumulation_is_another_plan_with_the_same_bits_here(name):
    problem = make(name)
    fast = dataclasses.replace(problem.quant, fast_accumulation=True)
    PLANS.clear()
    assert_same_bits(call(problem, quant=fast), call(problem), "out")
    assert PLANS.stats().size == 2


def test_bad_calls():
    problem = make("mxfp8")
    with pytest.raises(ContractError, match="^sample_h_sf: expected a tensor"):
        call(problem, h_sf=None)
    with pytest.raises(TypeError, match="^quant: expected QuantSpec or MxQuantSpec"):
        call(problem, quant="fp8")


@pytest.mark.parametrize(
    ("quant", "fused", "size_bytes"),
    [
        ("fp8", False, 38912000),
        ("fp8", True, 18432000),
        ("mxfp4-weights", True, None),
        ("nvfp4-output", False, None),
    ],
)
def test_the_command_line(quant, fused, size_bytes):
    sizes = "--d-model 512 --h-q 8 --h-kv 2 --batch 2 --tokens 1000 --target cpu --json --quant"
    knobs = ["--fuse-norm-rope", "--fuse-gate"] if fused else []
    arguments = ["probe", "gated-attention-block", *sizes.split(), quant, *knobs]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.output)
    assert {stage["engine"] for stage in report["stages"]} == {"reference"}
    if size_bytes is not None:
        assert report["workspace_bytes"] == size_bytes
