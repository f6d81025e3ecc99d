# SPDX-License-Identifier: Apache-2.0
"""How the product of few rows with e2m1 weights divides its work."""

from __future__ import annotations

import itertools

import pytest

from cudnn_blocks.stages.dequant_gemm.portable_e2m1_config import (
    HOLE_SLOTS,
    SLICES,
    TILE_ROWS,
    E2m1DecodeConfig,
    smem_bytes,
)
from cudnn_blocks.stages.dequant_gemm.portable_layout import BLOB_TILE, STEP
from cudnn_blocks.target import GPU_TARGET_NAMES, Target

SIZES = (
    (8, 32),
    (136, 416),
    (392, 96),
    (2048, 4096),
    (9216, 2048),
    (17408, 4096),
    (3072, 65536),
    (100_000, 1024),
    (3_000_000, 64),
)


def configs(target):
    for block_size in (16, 32):
        for n, k in SIZES:
            for m in (1, 9, 32, 64, 128):
                found = E2m1DecodeConfig.from_geometry(m, n, k, target, block_size=block_size)
                yield m, n, k, found


@pytest.mark.parametrize("name", GPU_TARGET_NAMES)
def test_every_tile_and_step_has_one_warp(name):
    target = Target.parse(name)
    for m, n, k, config in configs(target):
        all_tiles = -(-n // BLOB_TILE) * (BLOB_TILE // TILE_ROWS)
        ends = [config.first_tile(c, all_tiles) for c in range(config.clusters + 1)]
        assert (ends[0], ends[-1]) == (0, all_tiles)
        shares = [end - first for first, end in itertools.pairwise(ends)]
        assert max(shares) == config.tiles
        assert min(shares) >= config.tiles - 1
        assert config.slices * config.row_groups == SLICES
        assert config.passes * config.pass_steps * SLICES * STEP >= k
        assert (config.passes - 1) * config.pass_steps * SLICES * STEP < k
        assert config.tokens >= min(m, 32)


@pytest.mark.parametrize("name", GPU_TARGET_NAMES)
def test_shared_memory_has_room_for_what_was_chosen(name):
    target = Target.parse(name)
    for *_, config in configs(target):
        assert smem_bytes(config) <= target.smem_per_cta_bytes
        if config.ctas_per_sm == 2:
            assert 2 * smem_bytes(config) < target.smem_per_cta_bytes
            assert config.slots <= HOLE_SLOTS


def test_rows_of_the_target_models_are_even_over_132_sms():
    for n, tiles in ((9216, 9), (2048, 2), (17408, 17)):
        config = E2m1DecodeConfig.from_geometry(1, n, 2048, Target.parse("sm_90a"), block_size=32)
        assert (config.clusters, config.tiles, config.splits) == (132, tiles, 1)
        assert config.ctas_per_sm == 2


def test_much_of_x_is_shared_by_two_ctas():
    hopper, oldest = Target.parse("sm_90a"), Target.parse("sm_80")
    for target, splits in ((hopper, 2), (oldest, 1)):
        config = E2m1DecodeConfig.from_geometry(32, 2048, 4096, target, block_size=32)
        assert config.splits == splits


@pytest.mark.parametrize(("n", "k"), [(9216, 2080), (9208, 2048), (9216, 1152)])
def test_what_has_edges_is_not_whole(n, k):
    config = E2m1DecodeConfig.from_geometry(1, n, k, Target.parse("sm_90a"), block_size=32)
    assert not config.is_whole
    assert config.is_ragged == (k % STEP != 0)
