# SPDX-License-Identifier: Apache-2.0
"""Compiles Hopper attention kernels, on a machine with no GPU, and reads what they became.

By default one a head size, the modes spread over them; ``--all-targets`` takes every mode.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cudnn_blocks.stages.attention.hopper_config import FP8_TILES, NUM_THREADS, TILES, SdpaConfig
from cudnn_blocks.target import Target
from tests.codegen.cubin_sass import opcodes_of
from tests.codegen.cubin_usage import usage_of
from tests.conftest import SUMMARY_LINE
from tests.helpers.sdpa_problem import spec_plan

HOPPER = Target.parse("sm_90a")
LAUNCH_REGISTERS = 65536 // NUM_THREADS // 8 * 8
MAX_R2UR = 24
"""Registers copied to uniform ones; hundreds where wgmma descriptors have none of their own."""


@dataclass(frozen=True)
class Case:
    """One specialisation."""

    d_head: int
    heads: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"D={self.d_head} heads={self.heads[0]}-{self.heads[1]}"]
        parts += [f"{name}={value}" for name, value in self.options.items()]
        return " ".join(parts).replace("torch.", "")


PLAIN: dict[str, Any] = {}
GATED = {"has_gate": True, "has_lse": True}
FULL = {"is_causal": False}
BOUNDED = {"has_seq_lens": True, "causal_bottom_right": True, "dtype": torch.float16}
BAND = {"window_left": 100, "window_right": 3}
CODES = torch.float8_e4m3fn
FP8 = {"dtype": CODES}
FP8_ALL = {**FP8, **GATED, **BAND, "has_seq_lens": True, "o_dtype": CODES}
MAX_FP8_STACK_BYTES = 16
"""256 channels next to 128 keys: a register or two are put by at the boundary of tiles."""

CASES = [
    Case(64, (5, 5), {**GATED, **BOUNDED, **BAND}),
    Case(128, (8, 2), PLAIN),
    Case(256, (16, 2), {**GATED, **BOUNDED}),
    Case(64, (3, 1), {**FP8, **FULL}),
    Case(256, (16, 2), FP8_ALL),
]
EVERY = [
    *(
        Case(d_head, heads, options)
        for d_head, heads, options in itertools.product(
            (64, 128, 256),
            ((16, 2), (3, 1)),
            (
                PLAIN,
                GATED,
                FULL,
                {**FULL, **GATED},
                {**FULL, **GATED, "has_seq_lens": True},
                {**FULL, "window_left": 64},
                {**GATED, **BOUNDED, **BAND},
            ),
        )
    ),
    *(
        Case(d_head, (16, 2), {**FP8, **options})
        for d_head, options in itertools.product(
            (64, 128, 256), (PLAIN, GATED, {**FULL, **GATED, "o_dtype": CODES}, FP8_ALL)
        )
    ),
    Case(128, (8, 2), {"dtype": torch.float16, "has_lse": True}),
    Case(256, (16, 2), {"has_lse": True, "has_seq_lens": True}),
]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        chosen = CASES + EVERY * metafunc.config.getoption("--all-targets")
        metafunc.parametrize("case", chosen, ids=[str(case).replace(" ", "-") for case in chosen])


@pytest.mark.timeout(300)  # a specialisation takes half a minute on a busy machine
def test_compiles_without_spills_or_serialised_products(case, tmp_path, record_property):
    plan = spec_plan(
        heads=case.heads,
        d_head=case.d_head,
        target=HOPPER.name,
        engines={"sdpa": "hopper"},
        **case.options,
    )
    plan.check_support()
    (stage,) = plan._stages
    config = stage._choose_kernel().config
    cubin = stage.compiled_kernel(keep_cubin=True).cubin
    assert cubin is not None
    *others, kernel = sorted(usage_of(cubin, tmp_path), key=lambda one: one.registers)
    opcodes = opcodes_of(cubin, tmp_path)
    product = "QGMMA" if config.is_fp8 else "HGMMA"
    line = (
        f"{HOPPER.name:8} sdpa {case} [{stage.describe()}]: {kernel.registers} registers, "
        f"{kernel.stack_bytes} stack B, {kernel.local_bytes} local B, "
        f"{stage.smem_bytes()} of {HOPPER.smem_per_cta_bytes} shared B, "
        f"{opcodes[product]} {product}, {opcodes['R2UR']} R2UR"
    )
    record_property(SUMMARY_LINE, line)
    assert len(others) == config.is_fp8, "codes of v are transposed first"
    max_stack_bytes = MAX_FP8_STACK_BYTES if config.is_short_of_registers else 0
    assert all(one.stack_bytes == one.local_bytes == 0 for one in others), f"spills: {line}"
    assert kernel.stack_bytes <= max_stack_bytes, f"spills: {line}"
    assert kernel.local_bytes == 0, f"spills: {line}"
    assert opcodes["STL"] <= max_stack_bytes // 4, f"spills: {line}"
    assert kernel.registers == LAUNCH_REGISTERS, line
    assert stage.smem_bytes() <= HOPPER.smem_per_cta_bytes, line
    assert opcodes["UTMALDG"], line
    scores, output = config.d_head // config.mma_k, config.tile.n // config.mma_k
    turns = config.num_parts + 1  # the loops, and the boundary of tiles
    assert opcodes[product] == scores + turns * (scores + output), line
    # Serialised products have a wait each.
    groups = 1 + 2 * turns
    assert opcodes["WARPGROUP"] == 2 * groups, f"a fence and a wait per group: {line}"
    assert opcodes["R2UR"] <= MAX_R2UR, line


@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("d_head", sorted(TILES))
def test_tiles_fit_and_are_whole_products(d_head, dtype):
    from cudnn_blocks.stages.attention.hopper_config import smem_bytes

    config = hopper_config(d_head=d_head, dtype=dtype)
    assert config.tile == (FP8_TILES if dtype == "e4m3" else TILES)[d_head]
    assert smem_bytes(config) <= HOPPER.smem_per_cta_bytes
    assert config.tile.n % config.mma_k == 0
    assert config.tile.n <= 256
    assert config.value_panel.columns % config.value_panel.chunk == 0


@pytest.mark.parametrize(
    ("heads", "cluster"), [((16, 2), 2), ((2, 2), 1), ((3, 1), 1), ((6, 1), 2), ((14, 2), 1)]
)
def test_clusters_share_keys_where_their_heads_pair_up(heads, cluster):
    config = hopper_config(h_q=heads[0], h_kv=heads[1])
    assert config.cluster == cluster
    assert config.num_clusters == HOPPER.num_sms // cluster
    assert config.head_units * cluster == heads[0]
    assert config.gqa_ratio % cluster == 0


def test_the_key_of_a_kernel_drops_what_its_mask_does_not_use():
    full = hopper_config(is_causal=False, causal_bottom_right=True, window_right=5)
    assert full == hopper_config(is_causal=False)
    assert hopper_config(window_right=-1) == hopper_config(window_right=0)
    assert hopper_config(window_left=2**31) == hopper_config(window_left=2**30)
    assert hopper_config(window_left=0) != hopper_config(window_left=-1)


def hopper_config(**changes: Any) -> SdpaConfig:
    facts: dict[str, Any] = {
        "dtype": "bf16",
        "h_q": 16,
        "h_kv": 2,
        "d_head": 256,
        "is_causal": True,
        "causal_bottom_right": False,
        "window_left": -1,
        "window_right": -1,
        "has_gate": False,
        "has_lse": False,
        "has_seq_lens": False,
    }
    return SdpaConfig.from_geometry(HOPPER, **{**facts, **changes})
