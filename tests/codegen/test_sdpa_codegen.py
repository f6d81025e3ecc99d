# SPDX-License-Identifier: Apache-2.0
"""Compiles portable attention kernels, on a machine with no GPU, and reads what they became.

By default every head size on every generation, the modes spread over them; ``--all-targets`` takes
every mode on every target.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cudnn_blocks.target import GPU_TARGET_NAMES, Target
from tests.codegen.cubin_sass import opcodes_of
from tests.codegen.cubin_usage import usage_of
from tests.conftest import SUMMARY_LINE
from tests.helpers.sdpa_problem import spec_plan

MAX_REGISTERS = 255
MAX_STACK_BYTES = 64
"""32 query rows of 128 channels a warp leave a few addresses without a register."""


@dataclass(frozen=True)
class Case:
    """One specialisation; ``targets`` are those of a default run."""

    d_head: int
    targets: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"D={self.d_head}"]
        parts += [f"{name}={value}" for name, value in self.options.items()]
        return " ".join(parts).replace("torch.", "")


PLAIN: dict[str, Any] = {}
GATED = {"has_gate": True, "has_lse": True}
BOUNDED = {"has_seq_lens": True, "causal_bottom_right": True, "dtype": torch.float16}
BAND = {"window_left": 100, "window_right": 3, "has_lse": True}
FULL = {"is_causal": False, "window_left": 64}
EVERYTHING = {**GATED, **BOUNDED, **BAND}
CODES = torch.float8_e4m3fn
FP8 = {**EVERYTHING, "dtype": CODES, "o_dtype": CODES}

CASES = [
    Case(64, ("sm_80",), EVERYTHING),
    Case(64, ("sm_100a",), FULL),
    Case(128, ("sm_80", "sm_90a"), GATED),
    Case(128, ("sm_120a",), BOUNDED),
    Case(256, ("sm_80",), BAND),
    Case(256, ("sm_90a",), EVERYTHING),
    Case(256, ("sm_120a",), GATED),
    Case(64, ("sm_90a",), FP8),
    Case(128, ("sm_80",), FP8),
]
EVERY = [
    Case(d_head, GPU_TARGET_NAMES, options)
    for d_head, options in itertools.product((64, 128, 256), (PLAIN, GATED, FULL, EVERYTHING, FP8))
]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        everything = CASES + EVERY * metafunc.config.getoption("--all-targets")
        chosen = [(case, target) for case in everything for target in case.targets]
        ids = [f"{target}-{case}".replace(" ", "-") for case, target in chosen]
        metafunc.parametrize(("case", "target"), chosen, ids=ids)


@pytest.mark.timeout(300)  # a specialisation takes half a minute on a busy machine
def test_compiles_with_few_spills(case, target, tmp_path, record_property):
    engines = {"sdpa": "portable"}
    plan = spec_plan(d_head=case.d_head, target=target, engines=engines, **case.options)
    plan.check_support()
    (stage,) = plan._stages
    limit_bytes = Target.parse(target).smem_per_cta_bytes
    cubin = stage.compiled_kernel(keep_cubin=True).cubin
    assert cubin is not None
    (kernel,) = usage_of(cubin, tmp_path)
    opcodes = opcodes_of(cubin, tmp_path)
    line = (
        f"{target:8} sdpa {case} [{stage.describe()}]: {kernel.registers} registers, "
        f"{kernel.stack_bytes} stack B, {kernel.local_bytes} local B, "
        f"{stage.smem_bytes()} of {limit_bytes} shared B"
    )
    record_property(SUMMARY_LINE, line)
    assert kernel.stack_bytes <= MAX_STACK_BYTES, f"spills: {line}"
    assert kernel.local_bytes == 0, f"spills: {line}"
    assert kernel.registers <= MAX_REGISTERS, line
    assert stage.smem_bytes() <= limit_bytes, line
    assert opcodes["HMMA"], line
    assert opcodes["LDSM"], line
    assert opcodes["LDGSTS"], line
