# SPDX-License-Identifier: Apache-2.0
"""Target: names, facts, and where they come from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from cudnn_blocks import ContractError, CudaUnavailableError, Target
from cudnn_blocks import target as target_module
from cudnn_blocks.target import CPU, GPU_TARGET_NAMES, TARGET_NAMES

SMEM_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_87": 163,
    "sm_89": 99,
    "sm_90a": 227,
    "sm_100a": 227,
    "sm_103a": 227,
    "sm_110a": 227,
    "sm_120a": 99,
    "sm_121a": 99,
}
"""CUDA programming guide, table of technical specifications per compute capability."""


def test_the_targets_are_these():
    assert ("cpu", *GPU_TARGET_NAMES) == TARGET_NAMES
    assert tuple(SMEM_KIB) == GPU_TARGET_NAMES


@pytest.mark.parametrize("name", GPU_TARGET_NAMES)
def test_facts_of_a_named_target(name):
    target = Target.parse(name)
    assert str(target) == target.name == name
    assert f"sm_{target.sm}" == name.removesuffix("a")
    assert target.smem_per_cta_bytes == SMEM_KIB[name] * 1024
    assert target.num_sms > 0
    assert not target.is_cpu


def test_the_suffix_is_optional():
    assert Target.parse("sm_90") is Target.parse("sm_90a")
    assert Target.parse("sm_80a") is Target.parse("sm_80")


def test_cpu():
    assert Target.parse("cpu") is CPU
    assert CPU.is_cpu
    assert Target.of_device(torch.device("cpu")) is CPU


def test_a_target_stands_for_itself():
    assert Target.parse(CPU) is CPU


@pytest.mark.parametrize("name", ["", "sm_75", "SM_90", "h200", "sm_90aa"])
def test_unknown_names(name):
    with pytest.raises(ContractError, match=r"^target: expected one of cpu, sm_80, .*sm_121a, got"):
        Target.parse(name)


@pytest.mark.parametrize("value", [90, None, b"sm_90"])
def test_wrong_types(value):
    with pytest.raises(TypeError, match="target: expected str or Target"):
        Target.parse(value)


def test_meta_has_no_target():
    with pytest.raises(ContractError, match="or target= when the samples are on meta, got meta"):
        Target.of_device(torch.device("meta"))


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CudaUnavailableError, match="cuda:3 was asked for and torch sees no CUDA"):
        Target.of_device(torch.device("cuda", 3))


@pytest.fixture
def fake_gpu(monkeypatch):
    def install(major: int, minor: int, num_sms: int) -> None:
        facts = SimpleNamespace(major=major, minor=minor, multi_processor_count=num_sms)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
        target_module._of_index.cache_clear()

    yield install
    target_module._of_index.cache_clear()


def test_the_device_at_hand_has_its_own_number_of_sms(fake_gpu):
    fake_gpu(9, 0, 114)
    target = Target.of_device(torch.device("cuda", 0))
    assert (target.name, target.sm, target.num_sms) == ("sm_90a", 90, 114)
    assert target.smem_per_cta_bytes == 227 * 1024


def test_a_device_older_than_sm_80(fake_gpu):
    fake_gpu(7, 5, 40)
    with pytest.raises(ContractError, match="got sm_75"):
        Target.of_device(torch.device("cuda", 0))
