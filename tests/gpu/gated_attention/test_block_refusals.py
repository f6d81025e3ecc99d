# SPDX-License-Identifier: Apache-2.0
"""Bad calls of the block on a GPU: a typed error, nothing launched, the plan as good as before."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import ContractError, GradModeError
from tests.helpers.gated_attention_bad_calls import EVERY_BAD_CALL, make_full
from tests.helpers.gated_attention_problem import KNOBS
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]  # the first test of a kernel compiles it
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def plan():
    return make_full(CUDA).compiled(**KNOBS[-1])


def assert_refused(plan, problem, error, match="", **changes):
    before = problem.clone()
    workspace = make_full(CUDA).workspace(plan, 0x5A)
    with pytest.raises(error, match=match):
        problem.execute(plan, **{"workspace": workspace, **changes})
    torch.cuda.synchronize()
    for name, tensor in problem.operands.items():
        if tensor is not None:
            assert_same_bits(tensor, before[name], name)
    assert bool((workspace == 0x5A).all()), "a kernel was launched"


@pytest.mark.parametrize("name", list(EVERY_BAD_CALL))
def test_bad_calls(plan, name):
    assert_refused(plan, EVERY_BAD_CALL[name](make_full(CUDA)), ContractError)
    good = make_full(CUDA)
    assert bool(good.execute(plan)["out"].isfinite().all())


def test_workspaces(plan):
    problem = make_full(CUDA)
    good = problem.workspace(plan)
    for bad in (good[:-1], good.repeat(2)[::2], good.view(torch.int8), good.view(2, -1), None):
        assert_refused(plan, problem, ContractError, "^workspace: expected", workspace=bad)
    longer = torch.zeros(good.numel() + 16, dtype=torch.uint8, device=CUDA)
    match = "^workspace: expected a 256-byte aligned address"
    assert_refused(plan, problem, ContractError, match, workspace=longer[16:])
    over = good[: problem["out"].numel() * 2].view(torch.bfloat16).view(problem["out"].shape)
    match = "^workspace: expected memory of its own, apart from out"
    with pytest.raises(ContractError, match=match):
        problem.execute(plan, out=over, workspace=good)


def test_grad_mode(plan):
    problem = make_full(CUDA)
    weight = problem["w_qkvg"].clone().requires_grad_()
    assert_refused(plan, problem, GradModeError, "^w_qkvg: requires grad", w_qkvg=weight)
    with torch.no_grad():
        same = problem.clone().execute(plan, w_qkvg=weight)["out"]
    assert_same_bits(same, problem.execute(plan)["out"], "out")


def test_streams_of_a_wrong_type(plan):
    for stream in ("0", 1.5, object()):
        assert_refused(plan, make_full(CUDA), TypeError, "^current_stream", current_stream=stream)
