# SPDX-License-Identifier: Apache-2.0
"""Compiles QK norm + RoPE and the sigmoid gate, on a machine with no GPU, and reads the result.

By default the block's own specialisation for every generation and one each of the odd ones;
``--all-targets`` takes more sizes, on every target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cudnn_blocks.target import GPU_TARGET_NAMES, Target
from tests.codegen.cubin_sass import opcodes_of
from tests.codegen.cubin_usage import usage_of
from tests.codegen.kernel_cases import DEFAULT_TARGETS
from tests.conftest import SUMMARY_LINE
from tests.helpers.pointwise_problem import spec_gate, spec_qk

BF16, FP16 = torch.bfloat16, torch.float16
MAX_REGISTERS = 128
"""Two CTAs of 256 threads share a multiprocessor."""
VECTOR_CHANNELS = 8


@dataclass(frozen=True)
class NormRopeCase:
    """One specialisation of the norm and rotation; ``targets`` are those of a default run."""

    targets: tuple[str, ...]
    heads: tuple[int, int, int]
    """h_q, h_kv, D."""
    rope_dim: int
    dtype: torch.dtype = BF16
    has_norm: bool = True

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        norm = "norm" if self.has_norm else "no-norm"
        return f"qk_norm_rope heads={self.heads} R={self.rope_dim} {dtype} {norm}"

    def plan(self, target):
        return spec_qk(
            (2, 64, *self.heads),
            self.rope_dim,
            dtype=self.dtype,
            has_norm=self.has_norm,
            target=target,
        )

    def num_stores(self, config) -> int:
        """16-byte stores of one thread."""
        return config.heads * config.lane_vecs

    def num_special(self, config) -> int:
        """Reciprocal square roots of one thread."""
        return config.heads if self.has_norm else 0


@dataclass(frozen=True)
class GateCase:
    """One specialisation of the gate."""

    targets: tuple[str, ...]
    heads: tuple[int, int]
    """H, D."""
    dtype: torch.dtype = BF16

    def __str__(self) -> str:
        return f"sigmoid_gate heads={self.heads} {str(self.dtype).removeprefix('torch.')}"

    def plan(self, target):
        return spec_gate((2, 64, *self.heads), dtype=self.dtype, target=target)

    def num_stores(self, config) -> int:
        return config.tokens

    def num_special(self, config) -> int:
        """An exponential and a reciprocal per channel."""
        return 2 * VECTOR_CHANNELS * config.tokens


CASES = [
    NormRopeCase(DEFAULT_TARGETS, (16, 2, 256), 64),
    NormRopeCase(("sm_80",), (3, 2, 80), 6, FP16),
    NormRopeCase(("sm_120a",), (2, 1, 24), 24, FP16, has_norm=False),
    NormRopeCase(("sm_90a",), (16, 2, 256), 64, has_norm=False),
    NormRopeCase(("sm_90a",), (4, 2, 512), 512),
    NormRopeCase(("sm_100a",), (5, 3, 64), 0),
    GateCase(DEFAULT_TARGETS, (16, 256)),
    GateCase(("sm_80",), (3, 40), FP16),
]
EVERY = [
    *(
        NormRopeCase(GPU_TARGET_NAMES, heads, rope_dim, dtype, has_norm)
        for heads, rope_dim, dtype, has_norm in (
            ((32, 2, 256), 64, FP16, True),
            ((16, 4, 128), 128, BF16, True),
            ((5, 1, 64), 32, BF16, True),
            ((2, 1, 8), 8, BF16, True),
            ((3, 3, 104), 72, BF16, True),
            ((4, 2, 320), 12, BF16, False),
            ((4, 2, 512), 14, FP16, False),
        )
    ),
    *(GateCase(GPU_TARGET_NAMES, heads, FP16) for heads in ((32, 128), (1, 8), (7, 512))),
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
    line = (
        f"{target:8} {case} [{stage.describe()}]: {kernel.registers} registers, "
        f"{kernel.stack_bytes} stack B, {kernel.local_bytes} local B, "
        f"{kernel.shared_bytes} of {Target.parse(target).smem_per_cta_bytes} shared B"
    )
    record_property(SUMMARY_LINE, line)
    assert kernel.stack_bytes == kernel.local_bytes == kernel.shared_bytes == 0, line
    assert not opcodes["STL"], f"spills: {line}"
    assert kernel.registers <= MAX_REGISTERS, line
    config = stage._choose_kernel().config
    assert opcodes["STG"] == case.num_stores(config), f"{opcodes['STG']} stores: {line}"
    assert opcodes["MUFU"] == case.num_special(config), f"{opcodes['MUFU']} MUFU: {line}"
    assert not opcodes["BAR"], f"CTA-wide barriers: {line}"


def test_the_threads_of_a_head_are_those_that_fit_it():
    """Whole lines of 128 bytes where a head has them; few idle lanes elsewhere."""
    from cudnn_blocks.stages.qk_norm_rope.portable_config import choose_heads, choose_lanes

    lanes = {d_head: choose_lanes(d_head // VECTOR_CHANNELS) for d_head in range(8, 513, 8)}
    assert [lanes[d_head] for d_head in (8, 24, 64, 80, 128, 256, 512)] == [1, 1, 8, 4, 8, 8, 16]
    for d_head, chosen in lanes.items():
        vecs = d_head // VECTOR_CHANNELS
        per_lane = -(-vecs // chosen)
        assert 32 % chosen == 0
        assert per_lane <= 4
        assert per_lane * chosen - vecs <= vecs // 2, f"D = {d_head}: idle lanes"
    assert choose_heads(16, 2, 4) == choose_heads(16, 2, 2) == 2
    assert choose_heads(32, 8, 5) == 4
    assert choose_heads(3, 1, 4) == 1
