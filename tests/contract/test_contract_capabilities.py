# SPDX-License-Identifier: Apache-2.0
"""Every capabilities row has a passing case; every neighbour outside it a typed refusal."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import NotServedError
from cudnn_blocks.stages.capabilities import AtLeast, OneOf
from cudnn_blocks.target import TARGET_NAMES
from tests.contract.op_cases import SERVED_OPS

PASSING = [
    pytest.param(build, id=f"{served.stage.name} {name}")
    for served in SERVED_OPS
    for name, build in served.passing.items()
]
NEIGHBOURS = [
    pytest.param(neighbour, id=f"{served.stage.name} {neighbour.name}")
    for served in SERVED_OPS
    for neighbour in served.neighbours
]
ROWS = [
    pytest.param(served, row, id=f"{served.stage.name} {row.engine}")
    for served in SERVED_OPS
    for row in served.stage.rows
]


@pytest.mark.parametrize("build", PASSING)
def test_a_passing_case_runs_right(build, device):
    op = build(device, None).compiled()
    before = op.clone()
    op.check(before, op.run(op.operands, **op.workspace()))


@pytest.mark.parametrize("target", TARGET_NAMES)
@pytest.mark.parametrize("build", PASSING)
def test_a_passing_case_is_served_on_every_target(build, target):
    op = build("meta", target)
    assert op.plan.check_support()
    (stage,) = op.plan.probe().stages
    assert (stage.engine == "reference") == (target == "cpu")


@pytest.mark.parametrize("target", TARGET_NAMES)
@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_a_neighbour_is_refused_on_every_target(neighbour, target):
    with pytest.raises(neighbour.error, match=neighbour.match):
        neighbour.build(target).check_support()
    report = neighbour.build(target).probe()
    assert (report.served, report.decline_type) == (False, neighbour.error.__name__)


@pytest.mark.parametrize(("served", "row"), ROWS)
def test_the_passing_cases_reach_every_value_of_the_row(served, row):
    stages = []
    for build in served.passing.values():
        op = build("meta", row.targets.values[0])
        op.plan.check_support()
        stages.append(op.plan._stages[0])
    for fact, constraint in row.serves.items():
        seen = {stage.facts[fact] for stage in stages}
        if isinstance(constraint, OneOf):
            assert seen == set(constraint.values), fact
        else:
            assert isinstance(constraint, AtLeast)
            assert constraint.low in seen, fact
    assert {stage.engine for stage in stages} == {row.engine}


@pytest.mark.parametrize(("served", "row"), ROWS)
def test_every_fact_of_the_row_has_a_neighbour(served, row):
    assert set(row.serves) <= {neighbour.fact for neighbour in served.neighbours}


@pytest.mark.parametrize(("served", "row"), ROWS)
def test_the_row_declines_every_target_that_it_does_not_name(served, row):
    build = next(iter(served.passing.values()))
    for target in set(TARGET_NAMES) - set(row.targets.values):
        plan = build("meta", target).plan
        plan._engines = {served.stage.name: row.engine}
        with pytest.raises(NotServedError, match=f"{row.engine}: target={target} "):
            plan.check_support()


@pytest.mark.parametrize(("served", "row"), ROWS)
def test_evidence_is_a_committed_file(served, row, pytestconfig):
    for target, file in (*row.evidence.items(), *row.beyond.items()):
        assert target in row.targets
        assert (pytestconfig.rootpath / file).is_file(), f"{row.engine} on {target}: no {file}"


@pytest.mark.gpu
@pytest.mark.parametrize("build", PASSING)
def test_the_reference_is_never_taken_for_a_gpu(build):
    plan = build(torch.device("cuda", 0), None).plan
    plan._engines = {plan.probe().stages[0].stage: "reference"}
    plan._supported = False
    with pytest.raises(NotServedError, match=r"reference: target=sm_\w+ \(served: cpu\)"):
        plan.check_support()
