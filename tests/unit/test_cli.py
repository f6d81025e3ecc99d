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


BLOCK = ("probe", "gated-attention-block", "--d-model", "2048", "--h-q", "16", "--h-kv", "2")
STAGES = ["qkv_gate_proj", "qk_norm_rope", "sdpa", "sigmoid_gate", "out_proj"]


def run_block(*arguments: str):
    return CliRunner().invoke(main, [*BLOCK, *arguments])


def test_block_has_a_row_per_stage_and_target():
    result = run_block("--json", "--target", "sm_90a", "--target", "cpu")
    assert result.exit_code == 0, result.output
    reports = json.loads(result.output)
    assert [[stage["stage"] for stage in report["stages"]] for report in reports] == [STAGES] * 2
    assert all(report["workspace_bytes"] == 218103808 for report in reports)
    fused = run_block("--json", "--target", "sm_90a", "--fuse-norm-rope", "--fuse-gate")
    (report,) = json.loads(fused.output)
    names = [stage["stage"] for stage in report["stages"]]
    assert names == ["qkv_gate_proj_norm_rope", "sdpa", "out_proj"]


def test_block_options_reach_the_plan():
    result = run_block(
        *("--d-head", "128", "--rope-dim", "0", "--batch", "2", "--tokens", "100"),
        *("--dtype", "fp16", "--no-causal", "--window-left", "7", "--seq-lens", "--lse"),
        *("--engine", "sdpa=portable", "--target", "sm_90a", "--json"),
    )
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.output)
    engines = {stage["stage"]: stage["engine"] for stage in report["stages"]}
    assert engines["sdpa"] == "portable"
    assert engines["out_proj"] == "hopper"
    rows = 2 * 100 * 2
    assert report["workspace_bytes"] == rows * 128 * (16 * 2 + 2 * 2) + rows * 128 * 16


def test_block_declines_exit_1_and_name_the_stage():
    result = run_block("--d-head", "96", "--rope-dim", "32", "--target", "sm_80")
    assert result.exit_code == 1
    assert "d_head=96 (served: 64, 128, 256" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--h-kv", "3"), "h_q: expected a multiple of h_kv = 3"),
        (("--no-qk-norm", "--rope-dim", "0"), "rope_dim: expected at least 2"),
        (("--no-causal", "--bottom-right"), "causal_bottom_right: expected False"),
        (("--engine", "sdpa"), "--engine: expected stage=engine, got sdpa"),
        (("--engine", "attention=hopper"), "engines: expected stage names among"),
        (("--target", "sm_70"), "target: expected one of"),
    ],
)
def test_block_bad_arguments_exit_2(arguments, message):
    result = run_block(*arguments)
    assert result.exit_code == 2
    assert message in result.output
