# SPDX-License-Identifier: Apache-2.0
"""``probe --file``, ``compile`` and ``schema``: exit status, table, JSON; commands for every op."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from cudnn_blocks.cli import main
from cudnn_blocks.support import SupportReports
from tests.unit.test_deploy_file import SMALLEST

DECODE = {"op": "causal-conv1d-update", "name": "decode", "channels": 8192}
UNSERVED = {"op": "sdpa-fwd", "name": "odd", "h_q": 4, "h_kv": 2, "d_head": 96}
BROKEN = {"op": "sdpa-fwd", "name": "broken", "h_q": 4, "h_kv": 3}
UP = {"op": "sigmoid-gate", "h_q": 16}


@pytest.fixture
def write(tmp_path):
    """Writes a deploy file; returns its path."""

    def write(*plans, **more):
        path = tmp_path / "deploy.json"
        path.write_text(json.dumps({"plans": plans, **more}))
        return str(path)

    return write


def run(*arguments: str):
    return CliRunner().invoke(main, arguments)


def options_of(fields) -> list[str]:
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in fields.items()]
    return [part for pair in pairs for part in pair]


@pytest.mark.parametrize("op", SMALLEST)
def test_every_op_has_a_command_with_the_fields_of_its_request(op):
    result = run("probe", op, *options_of(SMALLEST[op]), "--target", "sm_90a", "--json")
    assert result.exit_code == 0, result.output
    (report,) = SupportReports.model_validate_json(result.output).root
    assert (report.op, report.served, report.plan) == (op, True, None)
    for stage in report.stages:
        assert stage.engine is not None
        assert all(engine.reason for engine in stage.engines if not engine.served)
    assert run("probe", op).exit_code == 2


def test_a_file_is_probed_line_by_line_for_every_target(write):
    path = write(DECODE, UP, targets=["sm_90a", "cpu"])
    result = run("probe", "--file", path, "--json")
    assert result.exit_code == 0, result.output
    reports = SupportReports.model_validate_json(result.output).root
    assert [(report.plan, report.target) for report in reports] == [
        ("decode", "sm_90a"),
        ("decode", "cpu"),
        ("sigmoid-gate (plans[1])", "sm_90a"),
        ("sigmoid-gate (plans[1])", "cpu"),
    ]
    assert all(report.kernels is None for report in reports)


def test_targets_of_the_command_line_stand_instead_of_the_files(write):
    path = write(DECODE, targets=["sm_90a"])
    result = run("probe", "--file", path, "--target", "sm_80", "--json")
    (report,) = SupportReports.model_validate_json(result.output).root
    assert report.target == "sm_80"


def test_one_decline_exits_1_and_is_named(write):
    result = run("probe", "--file", write(DECODE, UNSERVED, targets=["sm_90a"]))
    assert result.exit_code == 1
    assert "odd on sm_90a declines: sdpa: hopper: d_head=96 (served: 64, 128" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name an op, or a deploy file with --file"),
        (("--file", "nowhere.json"), "'nowhere.json' does not exist"),
        (("fft",), "No such command 'fft'"),
    ],
)
def test_bad_arguments_of_probe_exit_2(arguments, message):
    result = run("probe", *arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("verb", ["probe", "compile"])
@pytest.mark.parametrize(
    ("plans", "more", "message"),
    [
        ([{"op": "fft"}], {}, "plans.0: expected Input tag 'fft'"),
        ([{**DECODE, "channel": 8}], {}, "plans.0.causal-conv1d-update.channel: expected Extra"),
        ([DECODE, BROKEN], {}, "broken: h_q: expected a multiple of h_kv = 3"),
        ([DECODE], {"targets": ["sm_12"]}, "targets.0: expected Input should be 'cpu', 'sm_80'"),
        ([{**DECODE, "engines": {"conv": "x"}}], {}, "decode: engines: expected stage names among"),
    ],
)
def test_a_bad_file_exits_2_and_names_the_place(write, tmp_path, verb, plans, more, message):
    path = write(*plans, **more)
    output = ("-o", str(tmp_path / "m.cbb")) if verb == "compile" else ()
    result = run(verb, "--file", path, "--target", "sm_90a", *output)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "m.cbb").exists()


@pytest.mark.parametrize(
    ("plans", "arguments", "status", "message"),
    [
        ([DECODE], (), 2, "--target: a bundle has one; the file names none"),
        ([DECODE], ("--target", "cpu"), 2, "the cpu has no kernels to compile"),
        ([DECODE], ("--target", "sm_70"), 2, "target: expected one of cpu, sm_80"),
        ([DECODE], ("--jobs", "0", "--target", "sm_90a"), 2, "0 is not in the range x>=1"),
        ([DECODE, UNSERVED], ("--target", "sm_90a"), 1, "odd on sm_90a declines: sdpa"),
    ],
)
def test_what_cannot_be_compiled_is_told_before_anything_is(
    write, tmp_path, plans, arguments, status, message
):
    result = run("compile", "--file", write(*plans), "-o", str(tmp_path / "m.cbb"), *arguments)
    assert result.exit_code == status, result.output
    assert message in result.output
    assert not (tmp_path / "m.cbb").exists()


@pytest.mark.parametrize("name", ["deploy", "probe"])
def test_schemas_are_printed(name):
    schema = json.loads(run("schema", name).output)
    assert schema["$schema"].startswith("https://json-schema.org/")
