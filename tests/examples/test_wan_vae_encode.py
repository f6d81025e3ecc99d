# SPDX-License-Identifier: Apache-2.0
"""The encode example: it compares the real model class, takes a checkpoint, and can fail."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from cudnn_blocks.integrations.diffusers import random_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "06_wan_vae_encode.py"
SMALL = {"base_dim": 8, "decoder_base_dim": 8, "z_dim": 4}


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small only make threads wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("example_06_wan_vae_encode", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def invoke(example):
    return lambda *argv: CliRunner().invoke(example.main, ["--device", "cpu", *map(str, argv)])


def test_encodes_the_clip_of_scikit_video_at_the_widths_of_wan_2_2(invoke):
    result = invoke("--frames", 1, "--width", 16)
    assert result.exit_code == 0, result.output
    assert "bigbuckbunny.mp4: 1 frames of 16x16" in result.output
    assert "CausalConv3dWithCache" in result.output
    assert re.search(
        r"latents \[1, 48, 1, 1, 1\]: relative difference .* 0\.0[01]\d\d", result.output
    )
    assert result.output.rstrip().endswith("PASSED: the same latents")


def test_takes_a_local_checkpoint(invoke, tmp_path):
    random_model(**SMALL, seed=3).save_pretrained(tmp_path)
    result = invoke("--model", tmp_path, "--check-only", "--frames", 9)
    assert result.exit_code == 0, result.output
    assert "latents [1, 4, 3, 1, 2]" in result.output
    assert "9 frames of 32x16" in result.output
    assert "ms" not in result.output.rpartition("latents")[2]


def test_fails_where_a_layer_is_wrong(example, invoke, monkeypatch):
    from cudnn_blocks.integrations.diffusers import resample_steps

    monkeypatch.setattr(example, "load_model", lambda *_: random_model(**SMALL))
    real = resample_steps.AvgDown._mean
    monkeypatch.setattr(resample_steps.AvgDown, "_mean", lambda self, x: 2 * real(self, x))
    result = invoke("--frames", 1)
    assert result.exit_code == 1
    assert "FAILED: the latents differ" in result.output


def test_refuses_a_folder_without_a_model_and_a_file_that_is_no_video(invoke, tmp_path):
    result = invoke("--model", tmp_path)
    assert result.exit_code == 2
    assert "no AutoencoderKLWan in" in result.output
    (tmp_path / "text.mp4").write_text("no video")
    result = invoke("--video", tmp_path / "text.mp4")
    assert result.exit_code == 2
    assert "no video in" in result.output


@pytest.mark.parametrize("missing", ["diffusers", "av", "skvideo"])
def test_a_missing_package_is_named_with_the_extras_that_have_it(invoke, monkeypatch, missing):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    result = invoke()
    assert result.exit_code == 2
    assert {"skvideo": "scikit-video"}.get(missing, missing) in result.output
    assert '".[diffusers,video]"' in result.output


@pytest.mark.gpu
def test_encodes_on_a_gpu(example):
    result = CliRunner().invoke(
        example.main, ["--device", "cuda", "--frames", "9", "--width", "320"]
    )
    assert result.exit_code == 0, result.output
    assert re.search(r"eager [\d.]+ ms, accelerated [\d.]+ ms: [\d.]+x", result.output)
