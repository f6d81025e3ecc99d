# SPDX-License-Identifier: Apache-2.0
"""The gated attention example: right against plain torch, its picture to scale, can fail."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "04_gated_attention.py"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("example_04_gated_attention", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def invoke(example, tmp_path):
    """Runs the program; its result, and where it was to put the picture."""

    def invoke(*argv):
        picture = tmp_path / "workspace.svg"
        return CliRunner().invoke(example.main, ["--picture", str(picture), *argv]), picture

    return invoke


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_it_agrees_with_plain_torch_at_every_length(invoke, dtype):
    result, _ = invoke("--device", "cpu", "--tokens", "9", "--dtype", dtype, "--check-only")
    assert result.exit_code == 0, result.output
    for pipeline in ("unfused", "fused"):
        for tokens in (9, 1):
            assert f"{pipeline}, {tokens} tokens: relative error " in result.output
    assert "`reference` engine" in result.output
    assert result.output.rstrip().splitlines()[-1] == "PASSED"
    assert " us" not in result.output


def test_the_stage_table_has_every_stage_of_both_pipelines(invoke):
    result, _ = invoke("--device", "cpu", "--tokens", "2", "--check-only")
    rows = re.findall(r"│ (unfused|fused) +│ (\w+) +│ reference │ run", result.output)
    unfused = ["qkv_gate_proj", "qk_norm_rope", "sdpa", "sigmoid_gate", "out_proj"]
    fused = ["qkv_gate_proj_norm_rope", "sdpa", "out_proj"]
    assert rows == [("unfused", name) for name in unfused] + [("fused", name) for name in fused]


def test_the_picture_is_to_scale(example, invoke):
    result, picture = invoke("--device", "cpu", "--tokens", "3", "--check-only")
    assert f"workspace map: {picture}" in result.output
    root = ElementTree.parse(picture).getroot()
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.get("fill") in example.COLORS]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "proj: 55,296 bytes at 0, columns Q 4096, GATE 4096, K 512, V 512" in texts
    assert "o: 24,576 bytes at 55,296" in texts
    widths = [float(bar.get("width")) for bar in bars]
    assert [round(w / widths[2], 1) for w in widths] == [8, 8, 1, 1, 8]
    starts = [float(bar.get("x")) - example.MARGIN for bar in bars]
    assert starts[0] == 0
    assert starts[4] == pytest.approx(example.BAR_WIDTH * 55296 / (55296 + 24576), abs=0.1)
    assert sum(widths) == pytest.approx(example.BAR_WIDTH, abs=0.5)


def test_it_prints_times(invoke, example, monkeypatch):
    monkeypatch.setattr(example, "TIMED_RUNS", 1)
    monkeypatch.setattr(example, "WARM_UP_RUNS", 0)
    result, _ = invoke("--device", "cpu", "--tokens", "1")
    assert result.exit_code == 0
    assert (
        len(re.findall(r"^(unfused|fused), 1 tokens, eager: [\d,]+ us$", result.output, re.M)) == 2
    )


def test_it_fails_where_query_and_gate_are_taken_for_one_another(invoke, example, monkeypatch):
    """The fault of a wrong weight layout: heads other than the first get the wrong rows."""
    right = example.qkvg_from_hf

    def wrong(q_proj, *others):
        return right(q_proj.roll(256, dims=0), *others)

    monkeypatch.setattr(example, "qkvg_from_hf", wrong)
    result, _ = invoke("--device", "cpu", "--tokens", "2", "--check-only")
    assert result.exit_code == 1
    assert "FAILED: a result is too far from the layer in FP32" in result.output


def test_it_refuses_bad_arguments(invoke):
    for argv in (["--tokens", "0"], ["--dtype", "fp32"], ["--device", "tpu"]):
        result, _ = invoke(*argv)
        assert result.exit_code == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_on_a_gpu(invoke, dtype):
    result, _ = invoke("--device", "cuda", "--tokens", "700", "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert result.output.count("CUDA graph bitwise equal") == 6
    assert len(re.findall(r"tokens, (eager|CUDA graph): [\d,]+ us$", result.output, re.M)) == 4
    assert not torch.cuda.is_current_stream_capturing()
