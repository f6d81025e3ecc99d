# SPDX-License-Identifier: Apache-2.0
"""``zero_leading_frames``: planes full of NaN are never read, and count as exact zeros."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.conv3d_forms import BIAS_PAD, NORM, NORM_PAD, RAW
from tests.helpers.conv3d_gpu import CUDA, ENGINES, LARGE, SMALL, TALL, compiled_plan
from tests.helpers.conv3d_problem import assert_exact, make_problem

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # a convolution compiles for many seconds
SITES = ((1, 1, 1, 1), (2, 4, 3, 5), (1, 3, 20, 20), (2, 2, 31, 31), (1, 4, 9, 33))
"""One tile a frame among them: neighbouring tiles of a cluster then belong to different frames."""
ROWS = {
    "hopper": [
        (RAW, (160, 160), SMALL, {}),
        (RAW, (160, 160), LARGE, {}),
        (RAW, (320, 640), SMALL, {}),
        (NORM, (160, 320), SMALL, {"residual": "add_biased"}),
        (NORM_PAD, (160, 160), TALL, {"residual": "add"}),
        (BIAS_PAD, (160, 160), SMALL, {"residual": "add"}),
    ],
    "portable": [
        (RAW, (160, 160), SMALL, {}),
        (RAW, (8, 24), LARGE, {}),
        (NORM_PAD, (160, 320), TALL, {"residual": "add"}),
    ],
}
CASES = [(engine, *row) for engine in ENGINES for row in ROWS[engine]]


@pytest.mark.parametrize("hint", [1, 2])
@pytest.mark.parametrize(("engine", "kind", "channels", "tile_sites", "options"), CASES)
def test_a_hint_equals_true_zeros_and_reads_nothing(
    engine, hint, kind, channels, tile_sites, options
):
    hinted = compiled_plan(kind, engine, channels, tile_sites, zero_leading_frames=hint, **options)
    plain = compiled_plan(kind, engine, channels, tile_sites, **options)
    for sites in SITES:
        problem = make_problem(kind, sites, channels, device=CUDA, **options)
        problem["input"][:, :hint] = torch.nan
        zeroed = problem.clone()
        zeroed["input"][:, :hint] = 0
        problem.execute(hinted)
        zeroed.execute(plain)
        assert_exact(problem.written, zeroed.written, f"{sites}")
