# SPDX-License-Identifier: Apache-2.0
"""Compiles products of codes, on a machine with no GPU: e4m3, and weights in block-scaled codes.

By default a case or two per kernel; ``--all-targets`` takes every tile, format and target.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cudnn_blocks.quant_spec import BLOCK_FORMATS
from cudnn_blocks.stages.dequant_gemm.stage import DecodeStage, DequantGemmModes
from cudnn_blocks.stages.gemm.epilogues import NormRope
from cudnn_blocks.stages.gemm.stage import GemmModes, GemmStage
from cudnn_blocks.target import GPU_TARGET_NAMES, Target
from tests.codegen.cubin_sass import opcodes_of
from tests.codegen.cubin_usage import usage_of
from tests.conftest import SUMMARY_LINE

HOPPER, OLDEST, NEWER = ("sm_90a",), ("sm_80",), ("sm_100a",)
NEXT = NormRope(256, 16, 2, 64, True)
MAX_REGISTERS = 255


@dataclass(frozen=True)
class Case:
    """One specialisation; a format of weights, or e4m3 with or without norm and RoPE."""

    targets: tuple[str, ...]
    rows: int
    n: int = 9216
    k: int = 2048
    w_format: str | None = None
    norm_rope: NormRope | None = None
    engine: str = "hopper"
    fast_accumulation: bool = False

    def __str__(self) -> str:
        what = self.w_format or ("e4m3 norm-rope" if self.norm_rope else "e4m3")
        fast = " fast" if self.fast_accumulation else ""
        how = "" if self.w_format else f" {self.engine}{fast}"
        return f"{what} {self.rows}x{self.n}x{self.k}{how}"

    def stage(self, target: Target) -> DecodeStage | GemmStage:
        if self.w_format is not None:
            modes = DequantGemmModes(self.n, self.k, BLOCK_FORMATS[self.w_format])
            return DecodeStage("dequant_gemm", modes, self.rows, target)
        fast = self.fast_accumulation
        e4m3 = GemmModes(self.n, self.k, "e4m3", self.norm_rope, fast_accumulation=fast)
        return GemmStage("gemm", e4m3, self.rows, target, self.engine)


CASES = [
    Case(HOPPER, 4096),
    Case(HOPPER, 4096, norm_rope=NEXT),
    Case(HOPPER, 4096, norm_rope=NEXT, fast_accumulation=True),
    Case(OLDEST, 16, engine="portable"),
    Case((*HOPPER, *OLDEST), 16, w_format="mxfp4"),
    Case(HOPPER, 32, w_format="nvfp4"),
    # Where registers have been shortest.
    Case(("sm_89",), 4096, norm_rope=NEXT, engine="portable"),
    Case(NEWER, 32, w_format="mxfp8"),
    Case(NEWER, 1, w_format="nvfp4"),
]
EVERY = [
    *(
        Case(HOPPER, rows, norm_rope=norm_rope, fast_accumulation=fast)
        for norm_rope, every in ((None, (64, 300, 8192)), (NEXT, (300, 8192)))
        for rows in every
        for fast in (True, False)
    ),
    Case(HOPPER, 2048, 1536, norm_rope=NormRope(128, 4, 2, 128, False)),
    Case(HOPPER, 16, 1024, norm_rope=NormRope(64, 6, 2, 20, True)),
    *(Case(GPU_TARGET_NAMES, rows, engine="portable") for rows in (1, 64, 4096)),
    *(Case(GPU_TARGET_NAMES, rows, norm_rope=NEXT, engine="portable") for rows in (1, 4096)),
    *(
        Case(GPU_TARGET_NAMES, rows, n, k, w_format)
        for w_format in BLOCK_FORMATS
        for rows in (1, 16, 32, 128)
        for n, k in ((9216, 2048), (2048, 4096))
    ),
]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        everything = CASES + EVERY * metafunc.config.getoption("--all-targets")
        chosen = [(case, target) for case in everything for target in case.targets]
        ids = [f"{target}-{case}".replace(" ", "-") for case, target in chosen]
        metafunc.parametrize(("case", "target"), chosen, ids=ids)


@pytest.mark.timeout(300)  # as in test_gemm_codegen
def test_compiles_without_spills(case, target, tmp_path, record_property):
    place = Target.parse(target)
    stage = case.stage(place)
    stage.check()
    cubin = stage.compiled_kernel(keep_cubin=True).cubin
    assert cubin is not None
    (kernel,) = usage_of(cubin, tmp_path)
    opcodes = opcodes_of(cubin, tmp_path)
    line = (
        f"{target:8} {case} [{stage.describe()}]: {kernel.registers} registers, "
        f"{kernel.stack_bytes} stack B, {stage.smem_bytes()} of {place.smem_per_cta_bytes} shared B"
    )
    record_property(SUMMARY_LINE, line)
    assert kernel.stack_bytes == kernel.local_bytes == 0, f"spills: {line}"
    assert not opcodes["STL"], f"spills: {line}"
    assert kernel.registers <= MAX_REGISTERS, line
    assert stage.smem_bytes() <= place.smem_per_cta_bytes, line
    on_tensor_cores = "QGMMA" if case.w_format is None and stage.engine == "hopper" else "HMMA"
    assert opcodes[on_tensor_cores], f"no matrix instruction: {line}"
    if case.norm_rope is not None:
        assert opcodes["F2FP"], f"no conversion to codes: {line}"
