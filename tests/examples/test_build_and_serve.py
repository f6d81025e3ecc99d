# SPDX-License-Identifier: Apache-2.0
"""The bundle example: builds, loads in a fresh process, says what was not launched, can fail."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from cudnn_blocks.artifacts import Bundle

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "05_build_and_serve.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("example_05_build_and_serve", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(300)  # five fresh processes, two of which import the compiler
def test_it_builds_and_serves(tmp_path):
    kept = tmp_path / "model.cbb"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--plan", "decode", "--keep", str(kept)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().splitlines()[-1] == "PASSED"
    lines = re.findall(
        r"(cold|disk cache|bundle): +(\d+) ms to (.*), ([\d.]+) of cold", done.stdout
    )
    assert [mode for mode, *_ in lines] == ["cold", "disk cache", "bundle"]
    assert all(int(took_ms) > 0 for _, took_ms, *_ in lines)
    has_gpu = torch.cuda.is_available()
    assert all(("nothing was launched" in what) != has_gpu for _, _, what, _ in lines)
    assert all((what == "first result") == has_gpu for _, _, what, _ in lines)
    assert done.stdout.count("no CuTe DSL") == 1
    (kernel,) = Bundle(kept).manifest.kernels
    assert kernel.name.endswith("CausalConv1dUpdateKernel")


@pytest.mark.parametrize(
    ("bundled", "is_good"),
    [
        ({"sums": [1.0], "imports_dsl": False}, True),
        ({"sums": [1.5], "imports_dsl": False}, False),
        ({"sums": [float("nan")], "imports_dsl": False}, False),
        ({"sums": [1.0], "imports_dsl": True}, False),
    ],
)
def test_other_results_or_a_compiler_fail_it(example, monkeypatch, bundled, is_good):
    def run(command, **_):
        if "--serve" not in command:
            return ""
        has_bundle = json.loads(command[-1])["bundle"] is not None
        plain = {"sums": [1.0], "imports_dsl": True}
        return json.dumps({"took_ms": 8.0, **(bundled if has_bundle else plain)})

    monkeypatch.setattr(example, "run", run)
    result = CliRunner().invoke(example.main, ["--plan", "decode"])
    assert result.exit_code == (0 if is_good else 1)
    assert result.output.rstrip().splitlines()[-1].startswith("PASSED" if is_good else "FAILED")


def test_a_process_that_fails_ends_it(example):
    with pytest.raises(SystemExit, match="ended with status 3"):
        example.run([sys.executable, "-c", "raise SystemExit(3)"])
