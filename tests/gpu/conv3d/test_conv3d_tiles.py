# SPDX-License-Identifier: Apache-2.0
"""Whatever tile is chosen, the bits are the same: a clip and its chunks may choose differently."""

from __future__ import annotations

import pytest

from cudnn_blocks.stages.conv3d import hopper_config
from cudnn_blocks.stages.conv3d.hopper_tiles import candidates
from tests.helpers.conv3d_forms import BIAS_PAD, NORM, RAW
from tests.helpers.conv3d_gpu import CUDA, SMALL, compiled_plan
from tests.helpers.conv3d_problem import assert_exact, make_problem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # a convolution compiles for many seconds
SITES = ((1, 1, 1, 1), (1, 2, 31, 18), (2, 1, 17, 33))


@pytest.mark.parametrize("kind", [RAW, NORM, BIAS_PAD])
@pytest.mark.parametrize("channels", [(64, 96), (160, 160)], ids=str)
def test_every_tile_gives_the_same_bits(kind, channels, monkeypatch):
    problems = [make_problem(kind, sites, channels, device=CUDA) for sites in SITES]
    expected = [problem.clone() for problem in problems]
    default = compiled_plan(kind, "hopper", channels, SMALL)
    for problem in expected:
        problem.execute(default)
    tiles = [tile for tile, _ in candidates(channels[1], default.epilogue)]
    for tile in tiles:
        monkeypatch.setattr(hopper_config, "choose_tile", lambda *_, tile=tile: tile)
        plan = compiled_plan(kind, "hopper", channels, SMALL)
        assert str(tile) in plan.describe()
        for problem, wanted in zip(problems, expected, strict=True):
            own = problem.clone()
            own.execute(plan)
            assert_exact(own.written, wanted.written, f"{tile}")
