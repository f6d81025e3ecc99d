# SPDX-License-Identifier: Apache-2.0
"""The examples on other libraries' modules: right, with a checkpoint too, and able to fail."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from tests.helpers import fla_stand_in
from tests.helpers.qwen3_next import SIZES, make_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FLA_SIZES = ("--layers", "3", "--channels", "24", "--batch", "2", "--device", "cpu")


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def qwen():
    return load("07_qwen3_next_attention")


@pytest.fixture
def fla(monkeypatch):
    fla_stand_in.install(monkeypatch)
    return load("08_fla_short_convolution")


def invoke(example, *argv):
    return CliRunner().invoke(example.main, argv)


@pytest.fixture
def checkpoint(tmp_path):
    """A small Qwen3-Next checkpoint: config.json and one safetensors file."""
    model = make_model()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_next", **SIZES}))
    save_file(model.model.state_dict(prefix="model."), tmp_path / "model.safetensors")
    return tmp_path, model


def test_a_layer_of_a_checkpoint(qwen, checkpoint):
    path, model = checkpoint
    argv = ("--model", str(path), "--device", "cpu", "--tokens", "9")
    result = invoke(qwen, *argv, "--check-only")
    assert result.exit_code == 0, result.output
    assert "calls: 1 accelerated" in result.output
    assert "attention_mask: expected None" in result.output
    assert result.output.rstrip().endswith("PASSED")
    assert " us" not in result.output
    loaded = qwen.load_layer(path).state_dict()
    for name, weight in model.get_submodule("model.layers.1.self_attn").state_dict().items():
        assert torch.equal(loaded[name].to(weight.dtype), weight)


def test_a_wrong_layer_is_found(qwen, checkpoint, monkeypatch):
    path, _ = checkpoint
    monkeypatch.setitem(qwen.TOLERANCE, "bf16", 1e-9)
    argv = ("--model", str(path), "--device", "cpu", "--tokens", "9", "--check-only")
    result = invoke(qwen, *argv)
    assert result.exit_code == 1
    assert "WRONG  block: relative error" in result.output


def test_random_weights_have_the_published_sizes(qwen):
    with torch.device("meta"):
        layer = qwen.random_layer()
    assert layer.q_proj.weight.shape == (2 * 16 * 256, 2048)
    assert layer.k_proj.weight.shape == (2 * 256, 2048)


def test_a_stack_of_short_convolutions(fla):
    result = invoke(fla, *FLA_SIZES)
    assert result.exit_code == 0, result.output
    assert "ok  against plain FP32 torch: 5 steps" in result.output
    assert "adapter: 3 layers, host " in result.output
    assert "original {}" in result.output


def test_the_short_convolutions_of_a_checkpoint(fla, checkpoint, tmp_path):
    path, _ = checkpoint
    result = invoke(fla, "--model", str(path), "--device", "cpu", "--check-only")
    assert result.exit_code == 0, result.output
    assert "calls: 5 accelerated" in result.output
    (tmp_path / "empty").mkdir()
    result = invoke(fla, "--model", str(tmp_path / "empty"), "--device", "cpu")
    assert result.exit_code == 1
    assert "no safetensors file" in result.output


def test_a_wrong_step_is_found(fla, monkeypatch):
    real = fla.Decode.plain_step
    monkeypatch.setattr(fla.Decode, "plain_step", lambda self: [y + 1 for y in real(self)])
    result = invoke(fla, *FLA_SIZES, "--check-only")
    assert result.exit_code == 1
    assert "WRONG  against plain FP32 torch: step 0, layer 0" in result.output


def test_without_the_package_the_extra_is_named(fla, monkeypatch):
    monkeypatch.setitem(sys.modules, fla_stand_in.MODULE, None)
    result = invoke(fla, *FLA_SIZES)
    assert result.exit_code == 1
    assert "cudnn_blocks[fla]" in result.output
