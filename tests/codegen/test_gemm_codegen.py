# SPDX-License-Identifier: Apache-2.0
"""Compiles representative GEMM kernels, on a machine with no GPU, and reads what they became.

By default a case or two per kernel and epilogue; ``--all-targets`` takes every tile, head size and
target.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from cudnn_blocks import GatedAttentionGeometry
from cudnn_blocks.target import GPU_TARGET_NAMES, Target
from tests.codegen.cubin_sass import opcodes_of
from tests.codegen.cubin_usage import usage_of
from tests.conftest import SUMMARY_LINE
from tests.helpers.gemm_problem import spec_gemm, spec_projection

BF16, FP16 = torch.bfloat16, torch.float16
MAX_REGISTERS = 255
PORTABLE = "portable"
MATRIX_OPCODE = {"hopper": "HGMMA", "portable": "HMMA"}
HOPPER = ("sm_90a",)


@dataclass(frozen=True)
class Case:
    """One specialisation; ``targets`` are those of a default run."""

    targets: tuple[str, ...]
    rows: int
    sizes: tuple[int, ...]
    """N, K of a plain product; h_q, h_kv, D, rope_dim of a projection with norm and RoPE."""
    dtype: torch.dtype = BF16
    engine: str | None = None
    """Pin."""
    qk_norm: bool = True

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.sizes))
        dtype = str(self.dtype).removeprefix("torch.")
        norm = "" if self.qk_norm else " no-norm"
        return f"gemm {self.rows}rows {sizes} {dtype}{norm} {self.engine or 'default'}"

    def plan(self, target):
        is_plain = len(self.sizes) == 2
        slot = "gemm" if is_plain else "qkv_gate_proj_norm_rope"
        pins = {slot: self.engine} if self.engine else {}
        options = {"dtype": self.dtype, "target": target, "engines": pins}
        if is_plain:
            return spec_gemm((1, self.rows, *self.sizes), **options)
        h_q, h_kv, d_head, rope_dim = self.sizes
        geometry = GatedAttentionGeometry(2048, h_q, h_kv, d_head, rope_dim, qk_norm=self.qk_norm)
        return spec_projection(geometry, (1, self.rows), **options)


CASES = [
    Case(HOPPER, 4096, (9216, 2048)),
    Case(HOPPER, 4096, (16, 2, 256, 64)),
    Case(HOPPER, 64, (128, 64), FP16),
    Case(("sm_80", "sm_120a"), 4096, (9216, 2048), engine=PORTABLE),
    Case(("sm_86",), 4096, (16, 2, 256, 64), engine=PORTABLE),
    Case(("sm_100a",), 16, (4, 2, 64, 20), FP16, PORTABLE),
]
EVERY = [
    *(
        Case(HOPPER, rows, sizes, dtype, qk_norm=qk_norm)
        for rows, sizes, dtype, qk_norm in (
            (300, (1024, 512), BF16, True),
            (2048, (9216, 2048), FP16, True),
            (8192, (32, 2, 256, 64), BF16, True),
            (2048, (16, 2, 256, 64), FP16, True),
            (2048, (4, 2, 256, 128), BF16, True),
            (2048, (2, 1, 256, 256), FP16, True),
            (2048, (2, 1, 256, 254), BF16, True),
            (2048, (2, 1, 256, 6), BF16, True),
            (2048, (2, 1, 256, 0), BF16, True),
            (2048, (3, 1, 256, 64), BF16, False),
            (2048, (8, 2, 128, 128), FP16, True),
            (2048, (5, 1, 128, 64), BF16, True),
            (2048, (4, 2, 64, 64), BF16, True),
            (2048, (6, 2, 64, 20), BF16, True),
            (2048, (8, 8, 64, 32), FP16, False),
            (16, (4, 2, 64, 64), BF16, True),
            (16, (16, 2, 256, 64), BF16, True),
        )
    ),
    *(
        Case(GPU_TARGET_NAMES, rows, sizes, dtype, PORTABLE, qk_norm)
        for rows, sizes, dtype, qk_norm in (
            (4096, (9216, 2048), FP16, True),
            (300, (512, 512), BF16, True),
            (64, (2048, 4096), BF16, True),
            (1, (9216, 2048), BF16, True),
            (4096, (16, 2, 256, 64), FP16, True),
            (300, (16, 2, 256, 64), BF16, True),
            (1, (16, 2, 256, 64), BF16, True),
            (300, (8, 2, 128, 128), BF16, True),
            (1, (5, 1, 128, 64), FP16, True),
            (300, (6, 2, 64, 20), BF16, True),
            (4096, (2, 1, 256, 254), BF16, True),
            (4096, (3, 1, 256, 64), BF16, False),
            (4096, (2, 1, 256, 0), BF16, True),
        )
    ),
]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        everything = CASES + EVERY * metafunc.config.getoption("--all-targets")
        chosen = [(case, target) for case in everything for target in case.targets]
        ids = [f"{target}-{case}".replace(" ", "-") for case, target in chosen]
        metafunc.parametrize(("case", "target"), chosen, ids=ids)


@pytest.mark.timeout(300)  # an epilogue with norm and RoPE takes half a minute on a busy machine
def test_compiles_without_spills(case, target, tmp_path, record_property):
    plan = case.plan(target)
    plan.check_support()
    (stage,) = plan._stages
    limit_bytes = Target.parse(target).smem_per_cta_bytes
    cubin = stage.compiled_kernel(keep_cubin=True).cubin
    assert cubin is not None
    (kernel,) = usage_of(cubin, tmp_path)
    opcodes = opcodes_of(cubin, tmp_path)
    line = (
        f"{target:8} {case} [{stage.describe()}]: {kernel.registers} registers, "
        f"{kernel.stack_bytes} stack B, {kernel.local_bytes} local B, "
        f"{stage.smem_bytes()} of {limit_bytes} shared B"
    )
    record_property(SUMMARY_LINE, line)
    assert kernel.stack_bytes == kernel.local_bytes == 0, f"spills: {line}"
    assert not opcodes["STL"], f"spills: {line}"
    assert kernel.registers <= MAX_REGISTERS, line
    assert stage.smem_bytes() <= limit_bytes, line
    assert opcodes[MATRIX_OPCODE[stage.engine]], f"no matrix instruction: {line}"
    if stage.engine == "hopper":
        # One wait in the mainloop, and one behind it, per kind of tile: ptxas serialises nothing.
        kinds = 1 + stage._choose_kernel().config.tile.splits_tail
        assert opcodes["HGMMA"] % 4 == 0, line
        assert opcodes["WARPGROUP"] == 3 * kinds, f"{opcodes['WARPGROUP']} WARPGROUP: {line}"
        assert opcodes["UTMASTG"], line
