# SPDX-License-Identifier: Apache-2.0
"""The short check before a launch on a GPU accepts nothing that the full one refuses."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.conv3d_forms import CAUSAL, FORMS, KINDS, NORM_ONLY, NORM_PAD
from tests.helpers.conv3d_problem import Conv3dProblem, full_problem, gapped, make_problem, shifted

BF16 = torch.bfloat16
OPERANDS = [(kind, name) for kind in KINDS for name in FORMS[kind].op.operand_names]


def assert_plainly_good_only_if_good(problem: Conv3dProblem, **changes: object) -> None:
    """The short check of a launch answers True for what the full one accepts, and for no more."""
    plan = problem.compiled()
    plan._device_index = -1  # what a CPU tensor answers, so that the check itself can run here
    given = list(problem.operands.values())
    assert plan._is_plainly_good(given) == (problem.kind != CAUSAL)
    given = list({**problem.operands, **changes}.values())
    try:
        is_good = plan._is_plainly_good(given)
    except ValueError:  # a launch takes any exception for a no
        is_good = False
    assert not is_good, list(changes)


@pytest.mark.parametrize(("kind", "name"), OPERANDS)
def test_the_short_check_of_a_launch_sees_every_fault(kind, name):
    problem = full_problem(kind)
    tensor = problem[name]
    faults = [
        tensor.float(),
        shifted(tensor, 1),
        shifted(tensor, 4),
        gapped(tensor),
        tensor[:-1],
        tensor[0],
        None,
    ]
    for axis in range(tensor.dim()):
        faults.append(tensor.narrow(axis, 0, tensor.shape[axis] - 1).contiguous())
        faults.append(torch.cat([tensor, tensor.narrow(axis, 0, 1)], axis))
    for fault in faults:
        assert_plainly_good_only_if_good(problem, **{name: fault})
    for written in problem.written:
        if written != name:
            sizes = {n: problem[n].numel() for n in (written, name)}
            memory = torch.zeros(max(sizes.values()), dtype=BF16)
            shared = {n: memory[: sizes[n]].view(problem[n].shape) for n in sizes}
            assert_plainly_good_only_if_good(problem, **shared)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != CAUSAL])
def test_the_short_check_of_a_launch_leaves_the_unusual_to_the_full_one(kind):
    plan = full_problem(kind).compiled()
    plan._device_index = -1
    for sites, is_plain in (((1, 1, 1, 1), True), ((2, 3, 4, 5), True), ((0, 3, 4, 5), False)):
        smaller = make_problem(kind, sites, residual="add_biased", has_input_bias=True)
        if kind in (NORM_ONLY, NORM_PAD):
            smaller = make_problem(
                kind, sites, residual="add_biased", has_input_bias=True, history_frames=2
            )
        assert plan._is_plainly_good(list(smaller.operands.values())) == is_plain
    for width in range(1, 6):
        for _ in range(20):
            plan._layouts_of((1, 5, 6, width + 2, 24 if kind == NORM_ONLY else 16))
    assert len(plan._layouts) <= 64
