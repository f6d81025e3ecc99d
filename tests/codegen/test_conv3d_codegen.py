# SPDX-License-Identifier: Apache-2.0
"""Compiles representative Conv3D kernels, on a machine with no GPU, and reads what they became.

By default a case or two per kernel, as a hopper convolution takes many seconds to compile;
``--all-targets`` takes every epilogue, channel pair, tile and target.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest

from cudnn_blocks.target import GPU_TARGET_NAMES, Target
from tests.codegen.cubin_sass import opcodes_of
from tests.codegen.cubin_usage import usage_of
from tests.conftest import SUMMARY_LINE
from tests.helpers.conv3d_forms import BIAS_PAD, CAUSAL, NORM, NORM_ONLY, NORM_PAD, RAW
from tests.helpers.conv3d_problem import spec_plan

MAX_REGISTERS = 255
LARGE, SMALL = (1, 4, 352, 640), (1, 1, 44, 80)
PORTABLE = {"conv3d": "portable"}
FULL = {"residual": "add_biased", "history_frames": 2, "has_input_bias": True}
MATRIX_OPCODE = {"hopper": "HGMMA", "portable": "HMMA"}


@dataclass(frozen=True)
class Case:
    """One op whose kernels are compiled; ``targets`` are those of a default run."""

    kind: str
    channels: tuple[int, int]
    targets: tuple[str, ...]
    sites: tuple[int, int, int, int] = LARGE
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [self.kind, f"{self.channels[0]}to{self.channels[1]}", f"{self.sites[2]}rows"]
        for name, value in self.options.items():
            value = "-".join(value.values()) if isinstance(value, dict) else value
            parts.append(f"{name}={value}")
        return " ".join(parts)


HOPPER = ("sm_90a",)
CASES = [
    Case(RAW, (160, 160), HOPPER, SMALL, {"zero_leading_frames": 2}),
    Case(NORM_PAD, (160, 160), HOPPER, LARGE, FULL),
    Case(NORM, (320, 320), HOPPER, SMALL, {"residual": "add"}),
    Case(BIAS_PAD, (320, 640), HOPPER, LARGE, {"residual": "add_biased"}),
    Case(CAUSAL, (12, 160), (*HOPPER, "sm_80", "sm_120a")),
    Case(RAW, (160, 160), ("sm_80", "sm_120a"), options={"engines": PORTABLE}),
    Case(NORM_PAD, (160, 320), ("sm_86",), options={"engines": PORTABLE, **FULL}),
    Case(BIAS_PAD, (24, 40), ("sm_80",), options={"engines": PORTABLE, "residual": "add"}),
    Case(NORM, (24, 200), ("sm_80",), SMALL, {"engines": PORTABLE, "residual": "add"}),
    Case(NORM_ONLY, (160, 160), ("sm_80", "sm_90a"), options=FULL),
    Case(NORM_ONLY, (640, 640), ("sm_90a",)),
]
EVERY = [
    *(
        Case(RAW, channels, HOPPER, sites, {"zero_leading_frames": hint})
        for channels in ((160, 160), (320, 320), (640, 640), (96, 96), (256, 512))
        for sites, hint in ((LARGE, 0), (SMALL, 1))
    ),
    *(
        Case(kind, channels, HOPPER, sites, {"residual": residual})
        for kind, channels, sites, residual in itertools.product(
            (NORM, NORM_PAD),
            ((160, 160), (160, 320), (320, 320), (192, 384)),
            (LARGE, SMALL),
            ("none", "add_biased"),
        )
    ),
    *(
        Case(kind, channels, GPU_TARGET_NAMES, sites, {"engines": PORTABLE, "residual": residual})
        for kind, channels, sites, residual in (
            (RAW, (160, 160), LARGE, "none"),
            (RAW, (320, 640), SMALL, "none"),
            (RAW, (8, 8), SMALL, "none"),
            (NORM, (160, 160), LARGE, "add_biased"),
            (NORM_PAD, (320, 320), SMALL, "none"),
            (NORM_PAD, (24, 200), SMALL, "add"),
            (BIAS_PAD, (160, 160), SMALL, "add_biased"),
        )
    ),
    Case(NORM_PAD, (160, 160), HOPPER, (1, 7, 88, 160), {"residual": "add"}),
    Case(CAUSAL, (12, 160), GPU_TARGET_NAMES, SMALL, {"history_frames": 2}),
    *(Case(NORM_ONLY, (c, c), GPU_TARGET_NAMES, options=FULL) for c in (8, 96, 160, 320, 2048)),
]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        everything = CASES + EVERY * metafunc.config.getoption("--all-targets")
        chosen = [(case, target) for case in everything for target in case.targets]
        ids = [f"{target}-{case}".replace(" ", "-") for case, target in chosen]
        metafunc.parametrize(("case", "target"), chosen, ids=ids)


@pytest.mark.timeout(600)  # a hopper convolution takes a minute on a busy machine
def test_compiles_without_spills(case, target, tmp_path, record_property):
    plan = spec_plan(case.kind, case.channels, case.sites, target=target, **case.options)
    plan.check_support()
    limit_bytes = Target.parse(target).smem_per_cta_bytes
    for stage in plan._stages:
        cubin = stage.compiled_kernel(keep_cubin=True).cubin
        assert cubin is not None
        (kernel,) = usage_of(cubin, tmp_path)
        opcodes = opcodes_of(cubin, tmp_path)
        line = (
            f"{target:8} {stage.name} {case} [{stage.describe()}]: {kernel.registers} registers, "
            f"{kernel.stack_bytes} stack B, {kernel.local_bytes} local B, "
            f"{stage.smem_bytes()} of {limit_bytes} shared B"
        )
        record_property(SUMMARY_LINE, line)
        assert kernel.stack_bytes == kernel.local_bytes == 0, f"spills: {line}"
        assert not opcodes["STL"], f"spills: {line}"
        assert kernel.registers <= MAX_REGISTERS, line
        assert stage.smem_bytes() <= limit_bytes, line
        if stage.name in ("conv3d", "causal_conv3d"):
            assert opcodes[MATRIX_OPCODE[stage.engine]], f"no tensor cores: {line}"
        assert bool(opcodes["HGMMA"]) == (stage.engine == "hopper"), line


def test_the_engines_of_the_cases_are_those_that_they_are_for():
    for case in CASES + EVERY:
        for target in case.targets:
            plan = spec_plan(case.kind, case.channels, case.sites, target=target, **case.options)
            plan.check_support()
            is_hopper = plan._stages[-1].engine == "hopper"
            wants_hopper = case.kind not in (NORM_ONLY,) and "engines" not in case.options
            assert is_hopper == (wants_hopper and target == "sm_90a"), f"{target} {case}"


def test_the_cases_reach_every_tile_of_the_hopper_kernel():
    from cudnn_blocks.stages.conv3d.hopper_tiles import PIXEL_TILES

    seen = set()
    for case in CASES + EVERY:
        plan = spec_plan(case.kind, case.channels, case.sites, target="sm_90a", **case.options)
        plan.check_support()
        stage = plan._stages[-1]
        if stage.name == "conv3d" and stage.engine == "hopper":
            tile = stage._choose_kernel().config.tile
            seen.add((tile.width, tile.height))
    assert seen == {(row.width, row.height) for row in PIXEL_TILES}
