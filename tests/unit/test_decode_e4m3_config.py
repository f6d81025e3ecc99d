# SPDX-License-Identifier: Apache-2.0
"""How the product of few rows with e4m3 weights divides its work."""

from __future__ import annotations

import pytest

from cudnn_blocks.stages.dequant_gemm.portable_e4m3_config import (
    GROUP_ROWS,
    E4m3DecodeConfig,
    smem_bytes,
)
from cudnn_blocks.stages.dequant_gemm.portable_layout import STEP
from cudnn_blocks.target import GPU_TARGET_NAMES, Target

SIZES = ((8, 32), (136, 416), (2048, 4096), (9216, 2048), (17408, 4096), (3072, 65536))


def configs(target):
    for n, k in SIZES:
        for m in (1, 9, 32, 64, 128):
            yield m, n, k, E4m3DecodeConfig.from_geometry(m, n, k, target)


@pytest.mark.parametrize("name", GPU_TARGET_NAMES)
def test_every_unit_has_one_warp_and_every_sum_a_place(name):
    target = Target.parse(name)
    for m, n, k, config in configs(target):
        owners, places = [], set()
        for warp in range(config.busy_warps):
            for unit in range(config.first_unit(warp), config.first_unit(warp + 1)):
                owners.append(unit)
                assert config.warp_of(unit) == warp
                places.add((unit // config.turn_steps, warp))
        assert owners == list(range(config.units))
        assert len({group + warp for group, warp in places}) == len(places)
        assert max(group + warp for group, warp in places) < config.parts
        steps = config.splits * config.turns * config.turn_steps
        assert steps * STEP >= k
        assert config.clusters(n) * config.groups * GROUP_ROWS >= n
        assert config.tokens >= min(m, 64)
        assert smem_bytes(config) <= target.smem_per_cta_bytes


@pytest.mark.parametrize("name", ["sm_80", "sm_90a"])
def test_pieces_are_the_most_warps_of_a_group(name):
    for *_, config in configs(Target.parse(name)):
        warps = [
            {config.warp_of(group * config.turn_steps + t) for t in range(config.turn_steps)}
            for group in range(config.groups)
        ]
        assert config.pieces == max(map(len, warps))


def test_work_is_even_where_rows_alone_are_not():
    config = E4m3DecodeConfig.from_geometry(1, 9216, 2048, Target.parse("sm_90a"))
    # 288 groups of 16 steps on 132 SMs: 34.9 each, at best.
    assert config.splits * config.clusters(9216) <= 132
    assert config.units <= 40
