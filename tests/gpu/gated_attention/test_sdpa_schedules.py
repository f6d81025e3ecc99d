# SPDX-License-Identifier: Apache-2.0
"""Numbers of tiles, and of heads whose keys L2 does not hold at a time, of every kernel."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks.target import Target
from tests.helpers.sdpa_gpu import CUDA, ENGINES, guarded
from tests.helpers.sdpa_problem import assert_matches, make_problem, spec_plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # a kernel compiles for some seconds

SHAPES = {
    "sections of 2 and 1 heads": (1, 9000, 9000, (6, 3), 256, {}),
    "a section a head": (3, 200, 40000, (3, 3), 128, {"causal_bottom_right": True}),
    "sections of 3 groups, one left": (2, 1000, 20000, (10, 5), 128, {"window_left": 3000}),
    "more tiles than a round": (70, 129, 129, (4, 2), 64, {}),
    "one row in every tile": (300, 1, 90, (3, 1), 128, {"causal_bottom_right": True}),
    "rounds that end within a row": (1, 8100, 700, (14, 2), 64, {"is_causal": False}),
    "tiles without a key": (2, 9000, 300, (2, 1), 256, {"causal_bottom_right": True}),
    "tiles left of every window": (1, 5000, 300, (2, 1), 256, {"window_left": 50}),
}
"""B, S, Sk, heads, d_head and the mask."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", SHAPES)
def test_every_tile_is_computed_once(name, engine):
    b, s, sk, heads, d_head, mask = SHAPES[name]
    target = Target.of_device(CUDA).name
    options = {"heads": heads, "d_head": d_head, "has_lse": True, "has_gate": True, **mask}
    plan = spec_plan(b, s, sk, target=target, engines={"sdpa": engine}, **options)
    plan.compile()
    problem = make_problem(b, s, sk, device=CUDA, **options)
    actual, buffers = guarded(problem)
    actual.run(plan)
    torch.cuda.synchronize()
    for written, buffer in buffers.items():
        assert buffer.is_intact(), f"{name}: written outside {written}"
    assert_matches(actual, problem.expected(), name)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("heads", "d_head"), [((4, 2), 64), ((3, 1), 128), ((8, 2), 256)])
def test_lengths_of_all_kinds_beside_one_another(heads, d_head, engine):
    """Tiles with no key, one, whole blocks and more, in the stream of one CTA; none may hang it."""
    lens = (0, 1, 80, 81, 128, 129, 900, 0, 0, 640, 899)
    options = {"heads": heads, "d_head": d_head, "has_gate": True, "causal_bottom_right": True}
    problem = make_problem(len(lens), 700, 900, device=CUDA, seq_lens=lens, **options)
    plan = problem.compiled(engines={"sdpa": engine})
    actual, _ = guarded(problem)
    for _ in range(5):
        actual.run(plan)
        torch.cuda.synchronize()
        assert_matches(actual, problem.expected(), f"{engine} {heads} {d_head}")
