# SPDX-License-Identifier: Apache-2.0
"""Compiles the quantising and dequantising kernels, on a machine with no GPU, and reads the result.

By default the block's own specialisations for sm_90a and one each where e4m3 is integer arithmetic;
``--all-targets`` takes every format on every target.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from cudnn_blocks.quant_spec import BLOCK_FORMATS
from cudnn_blocks.target import GPU_TARGET_NAMES, Target
from tests.codegen.cubin_sass import opcodes_of
from tests.codegen.cubin_usage import usage_of
from tests.conftest import SUMMARY_LINE
from tests.helpers.quantize_problem import spec_blocks, spec_fp8

MAX_REGISTERS = 128
"""Two CTAs of 256 threads share a multiprocessor."""


@dataclass(frozen=True)
class QuantizeCase:
    """One specialisation; ``targets`` are those of a default run."""

    targets: tuple[str, ...]
    fmt: str
    heads: tuple[int, int] = (16, 256)
    """H, D."""
    dtype: torch.dtype = torch.bfloat16
    is_back: bool = False
    along_tokens: bool = False
    most_instructions: int | None = None
    """Per 16-byte vector of x, or per 16 codes: what still hides behind memory on an H200."""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        way = "dequantize" if self.is_back else "quantize"
        axis = "tokens" if self.along_tokens else "channels"
        return f"{way} {self.fmt} {axis} heads={self.heads} {dtype}"

    def plan(self, target):
        shape = (2, 64, *self.heads)
        if self.fmt == "fp8":
            return spec_fp8(shape, self.dtype, target=target)
        knobs = {"along_tokens": self.along_tokens, "target": target}
        return spec_blocks(self.fmt, shape, is_back=self.is_back, **knobs)


HOPPER = ("sm_90a",)
CASES = [
    QuantizeCase(("sm_80", "sm_90a"), "fp8", most_instructions=70),
    QuantizeCase(("sm_80", "sm_90a"), "mxfp8", most_instructions=110),
    QuantizeCase(HOPPER, "mxfp8", (2, 256), along_tokens=True),
    QuantizeCase(HOPPER, "nvfp4", (1, 4096), most_instructions=145),
    QuantizeCase(("sm_100a",), "mxfp4", (3, 96)),
    QuantizeCase(("sm_80", "sm_90a"), "mxfp8", is_back=True, most_instructions=150),
    QuantizeCase(("sm_120a",), "nvfp4", (5, 80), is_back=True),
]
EVERY = [
    QuantizeCase(GPU_TARGET_NAMES, "fp8", (3, 40), torch.float16),
    QuantizeCase(GPU_TARGET_NAMES, "mxfp8", (3, 72), along_tokens=True),
    QuantizeCase(GPU_TARGET_NAMES, "mxfp8", (3, 48), along_tokens=True, is_back=True),
    *(
        QuantizeCase(GPU_TARGET_NAMES, fmt, heads, is_back=is_back)
        for fmt in BLOCK_FORMATS
        for heads in ((1, 2048), (3, 96))
        for is_back in (False, True)
    ),
]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-targets")
        chosen = [
            (case, target)
            for case in CASES + EVERY * everything
            for target in (GPU_TARGET_NAMES if everything else case.targets)
        ]
        ids = [f"{target}-{case}".replace(" ", "-") for case, target in chosen]
        metafunc.parametrize(("case", "target"), chosen, ids=ids)


def test_compiles_without_spills(case, target, tmp_path, record_property):
    plan = case.plan(target)
    plan.check_support()
    (stage,) = plan._stages
    cubin = stage.compiled_kernel(keep_cubin=True).cubin
    assert cubin is not None
    (kernel,) = usage_of(cubin, tmp_path)
    opcodes = opcodes_of(cubin, tmp_path)
    config = stage._choose_kernel().config
    instructions = round(sum(opcodes.values()) / config.tokens)
    line = (
        f"{target:8} {case}: {kernel.registers} registers, {kernel.stack_bytes} stack B, "
        f"{instructions} instructions a vector, {kernel.shared_bytes} of "
        f"{Target.parse(target).smem_per_cta_bytes} shared B"
    )
    record_property(SUMMARY_LINE, line)
    assert kernel.stack_bytes == kernel.local_bytes == kernel.shared_bytes == 0, line
    assert not opcodes["STL"], f"spills: {line}"
    assert kernel.registers <= MAX_REGISTERS, line
    assert not opcodes["BAR"], f"CTA-wide barriers: {line}"
    if target == "sm_90a" and case.most_instructions is not None:
        assert instructions <= case.most_instructions, line
    # No loop and no early exit: each vector is stored once, and a scale beside it.
    assert opcodes["STG"] == num_stores(config, case.is_back), line


def num_stores(config, is_back):
    if is_back:
        return 2 * config.tokens
    if config.block is None:
        return config.tokens
    return 2 * config.tokens if not config.along_tokens else config.tokens + 8


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120a"])
def test_which_targets_convert_in_hardware(target):
    plan = spec_fp8((4, 64), target=target)
    plan.check_support()
    assert plan._stages[0]._choose_kernel().config.has_cvt == (target not in ("sm_80", "sm_86"))
