# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel for every target, on a machine with no GPU, and reads what it takes."""

from __future__ import annotations

import itertools

import pytest
import torch

from cudnn_blocks.target import Target
from tests.codegen.cubin_usage import cuobjdump, usage_of
from tests.codegen.kernel_cases import DEFAULT_TARGETS, FAMILIES, select
from tests.conftest import SUMMARY_LINE

MAX_REGISTERS = 255


def pytest_generate_tests(metafunc):
    if "kernel_case" in metafunc.fixturenames:
        chosen = select(metafunc.config.getoption("--all-targets"))
        ids = [f"{target}-{case.name.replace(' ', '-')}" for case, target in chosen]
        metafunc.parametrize(("kernel_case", "target"), chosen, ids=ids)


def test_compiles_without_spills(kernel_case, target, tmp_path, record_property):
    compiled = kernel_case.stage(target).compiled_kernel(keep_cubin=True)
    assert compiled.cubin is not None
    limit_bytes = Target.parse(target).smem_per_cta_bytes
    for i, kernel in enumerate(usage_of(compiled.cubin, tmp_path)):
        line = (
            f"{target:8} {kernel_case.name} #{i}: {kernel.registers} registers, "
            f"{kernel.stack_bytes} stack B, {kernel.local_bytes} local B, "
            f"{kernel.shared_bytes} of {limit_bytes} shared B"
        )
        record_property(SUMMARY_LINE, line)
        assert kernel.stack_bytes == kernel.local_bytes == 0, f"spills: {line}"
        assert kernel.registers <= MAX_REGISTERS, line
        assert kernel.shared_bytes <= limit_bytes, line


def test_the_tool_is_there():
    assert cuobjdump().exists()


def test_a_spill_would_be_seen(tmp_path, monkeypatch):
    """The reading, on the output of a kernel that does spill."""
    from tests.codegen import cubin_usage

    tool = tmp_path / "cuobjdump"
    tool.write_text(
        "#!/bin/sh\necho ' Function kernel_x:'\n"
        "echo '  REG:255 STACK:48 SHARED:1024 LOCAL:8 CONSTANT[0]:920 TEXTURE:0'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(cubin_usage, "cuobjdump", lambda: tool)
    (kernel,) = usage_of(b"", tmp_path)
    assert (kernel.registers, kernel.stack_bytes, kernel.local_bytes) == (255, 48, 8)
    assert (kernel.name, kernel.shared_bytes) == ("kernel_x", 1024)


def test_a_missing_tool_fails_with_a_reason(monkeypatch):
    from tests.codegen import cubin_usage

    monkeypatch.setattr(cubin_usage, "DISTRIBUTION", "no-such-distribution")
    monkeypatch.setattr(cubin_usage.shutil, "which", lambda _: None)
    cuobjdump.cache_clear()
    try:
        with pytest.raises(AssertionError, match="cuobjdump was not found: pip install"):
            cuobjdump()
    finally:
        cuobjdump.cache_clear()


def test_every_case_is_compiled_for_every_default_target():
    names = {case.name for family in FAMILIES.values() for case in family()}
    assert len(names) == sum(len(family()) for family in FAMILIES.values())
    assert {(case.name, target) for case, target in select(False)} == set(
        itertools.product(names, DEFAULT_TARGETS)
    )


def test_no_device_is_touched():
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
