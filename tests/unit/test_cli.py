# SPDX-License-Identifier: Apache-2.0
"""``python -m cudnn_blocks probe``: exit status, table, JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from cudnn_blocks import SupportReport, __version__
from cudnn_blocks.cli import main
from cudnn_blocks.target import GPU_TARGET_NAMES

PROBE = ("probe", "causal-conv1d-update", "--channels", "8192")


def run(*arguments: str):
    return CliRunner().invoke(main, [*PROBE, *arguments])


def test_served():
    result = run("--state-len", "4", "--dtype", "bf16", "--target", "sm_90a")
    assert result.exit_code == 0
    assert "portable" in result.output
    assert "sm_90a" in result.output


def test_every_target_gets_one_row_in_order():
    names = ["cpu", *GPU_TARGET_NAMES]
    result = run("--json", *(part for name in names for part in ("--target", name)))
    assert result.exit_code == 0
    rows = json.loads(result.output)
    assert [row["target"] for row in rows] == names
    assert all(row["served"] for row in rows)
    assert all(SupportReport.model_validate(row) for row in rows)


def test_a_repeated_target_gets_a_row_each_time():
    result = run("--json", "--target", "sm_80", "--target", "sm_80")
    assert len(json.loads(result.output)) == 2


def test_the_table_has_a_row_per_target():
    result = run("--target", "sm_80", "--target", "sm_121a")
    assert result.exit_code == 0
    rows = [line for line in result.output.splitlines() if "conv1d_update" in line]
    assert len(rows) == 2


@pytest.mark.parametrize(
    "unserved", [("--width", "5"), ("--state-len", "5"), ("--width", "1", "--state-len", "4")]
)
@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_any_decline_exits_1_and_says_why(unserved, as_json):
    result = run(*unserved, "--target", "sm_90a", *as_json)
    assert result.exit_code == 1
    assert "(served:" in result.output


def test_one_decline_among_many_exits_1(monkeypatch):
    from cudnn_blocks.stages import toolchain

    monkeypatch.setattr(toolchain, "dsl_version", lambda: "4.5.0")
    result = run("--json", "--target", "cpu", "--target", "sm_90a")
    assert result.exit_code == 1
    assert [row["served"] for row in json.loads(result.output)] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "sm_75"), "target: expected one of cpu, sm_80"),
        (("--channels", "0"), "channels: expected a positive size, got 0"),
        (("--channels", "many"), "'many' is not a valid integer"),
        (("--state-len", "2"), "state_len: expected at least width - 1 = 3, got 2"),
        (("--dtype", "fp32"), "'fp32' is not one of"),
        (("--state-layout", "channel-last"), "conv_state: expected strides"),
        (("--activation", "gelu"), "'gelu' is not one of"),
        (("--unknown",), "No such option"),
    ],
)
def test_bad_arguments_exit_2(arguments, message):
    result = run("--target", "cpu", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_channels_are_required():
    result = CliRunner().invoke(main, list(PROBE[:2]))
    assert result.exit_code == 2
    assert "--channels" in result.output


def test_every_knob_is_passed_on():
    result = run(
        *("--width", "3", "--state-len", "3", "--dtype", "fp16", "--state-layout", "channel-last"),
        *("--activation", "identity", "--bias", "--indices", "--on-bad-index", "report"),
        *("--target", "sm_86"),
    )
    assert result.exit_code == 0, result.output


def test_without_a_target_it_is_this_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rows = json.loads(run("--json").output)
    assert [row["target"] for row in rows] == ["cpu"]
    assert rows[0]["stages"][0]["engine"] == "reference"


def test_help_and_version():
    assert CliRunner().invoke(main, ["--help"]).exit_code == 0
    assert "bad arguments" in CliRunner().invoke(main, ["probe", "--help"]).output


@pytest.mark.parametrize(("width", "status"), [("4", 0), ("5", 1), ("x", 2)])
def test_as_a_module(width, status):
    done = subprocess.run(
        [sys.executable, "-m", "cudnn_blocks", *PROBE, "--width", width, "--target", "sm_90a"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == status, done.stderr


def test_version_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "cudnn_blocks", "--version"],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, __version__ in done.stdout) == (0, True), done.stderr
