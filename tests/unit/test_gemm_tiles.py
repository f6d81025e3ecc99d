# SPDX-License-Identifier: Apache-2.0
"""Which tile a product gets, and what every tile has to fit into; pure Python."""

from __future__ import annotations

import itertools

import pytest

from cudnn_blocks.stages.gemm import hopper_config, hopper_tiles, portable_config
from cudnn_blocks.stages.gemm.epilogues import D_HEADS, NormRope
from cudnn_blocks.target import GPU_TARGET_NAMES, Target

HOPPER = Target.parse("sm_90a")
SHAPES = list(itertools.product((1, 16, 64, 300, 2048, 4096, 32768), (8, 64, 2048, 9216, 17408)))
NORM_ROPES = [
    NormRope(d_head, 4, 2, rope_dim, has_norm)
    for d_head in D_HEADS
    for rope_dim in (0, 6, d_head // 2, d_head)
    for has_norm in (True, False)
]


def hopper(m, n, norm_rope=None, k=2048):
    kernels = hopper_config.GemmKernelConfig
    return kernels.from_geometry(m, n, k, HOPPER, dtype="bf16", norm_rope=norm_rope)


@pytest.mark.parametrize("norm_rope", [None, *NORM_ROPES], ids=str)
def test_every_hopper_tile_fits_and_holds_whole_pairs(norm_rope):
    for m, n in SHAPES:
        config = hopper(m, n, norm_rope)
        tile = config.tile
        assert hopper_config.smem_bytes(config) <= HOPPER.smem_per_cta_bytes
        assert config.num_clusters * tile.cluster_size <= HOPPER.num_sms
        assert tile.raster_group % (tile.cluster_m * tile.cluster_n) == 0
        fragments = [config.fragment] + [config.half_fragment] * tile.splits_tail
        for fragment in fragments:
            assert fragment.columns % hopper_config.STORE_COLUMNS == 0
            if norm_rope is not None:
                held = min(norm_rope.d_head, fragment.columns)
                assert fragment.columns % held == 0
                if held != norm_rope.d_head:
                    assert config.joins_heads
                    assert tile.cluster_n == 2
                    assert norm_rope.rope_dim <= held == hopper_config.SUM_COLUMNS


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
@pytest.mark.parametrize("norm_rope", [None, *NORM_ROPES[::3]], ids=str)
def test_every_portable_tile_fits_and_holds_whole_heads(target, norm_rope):
    target = Target.parse(target)
    for m, n in SHAPES:
        config = portable_config.GemmKernelConfig.from_geometry(
            m, n, 2048, target, dtype="fp16", norm_rope=norm_rope
        )
        assert portable_config.smem_bytes(config) <= target.smem_per_cta_bytes
        assert config.copy_rows % 8 == 0
        assert config.warp_m % portable_config.MMA_M == 0
        assert config.warp_n % (2 * portable_config.MMA_N) == 0
        assert config.chunk_rows % (config.threads // config.lanes) == 0
        if norm_rope is not None:
            assert config.tile.n % norm_rope.d_head == 0


def test_few_rows_and_columns_get_small_tiles():
    assert hopper(16, 9216).tile.m == 64
    assert hopper(4096, 128).tile.n == 128
    tiles = portable_config.GemmKernelConfig.from_geometry
    assert tiles(1, 9216, 2048, Target.parse("sm_80"), dtype="bf16").tile.m == 16
    assert tiles(8192, 9216, 2048, Target.parse("sm_80"), dtype="bf16").tile.m == 128


def test_long_products_and_short_sums_go_ping_pong():
    for m, n, k, is_pingpong in (
        (32768, 9216, 2048, True),
        (8192, 9216, 2048, True),
        (32768, 4096, 8192, True),
        (2048, 2048, 4096, False),
        (4096, 4096, 8192, False),
    ):
        assert hopper(m, n, k=k).tile.is_pingpong == is_pingpong, (m, n, k)


def test_a_short_last_wave_counts_as_half():
    """2048 x 17408 is 1088 shared tiles on 132 CTAs: eight waves, and 32 tiles that are split."""
    tile = hopper(2048, 17408, k=8192).tile
    assert tile.splits_tail
    assert 2 * (1088 % 132) <= 132


def test_the_table_serves_every_epilogue():
    for norm_rope in NORM_ROPES:
        assert any(hopper_tiles.serves(tile, norm_rope) for tile in hopper_tiles.TILES), norm_rope
