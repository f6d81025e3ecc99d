# SPDX-License-Identifier: Apache-2.0
"""Products in service: launches in a row, kernels found again, large results."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import ops
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.kernel_cache import KERNELS
from tests.helpers.gemm_gpu import CUDA, ENGINES, compiled_plan, run_guarded
from tests.helpers.gemm_problem import make_gemm
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
engines = pytest.mark.parametrize("engine", ENGINES)


@engines
@pytest.mark.parametrize("tokens", [64, 256, 2048])
def test_every_launch_waits_for_the_one_before(engine, tokens):
    """A chain of products, each on the result of the last, with and without a pause between."""
    size = 512
    plan = compiled_plan(engine, 32768, (size, size))
    first = make_gemm((1, tokens, size, size), data="normal", device=CUDA)
    weights = [make_gemm((1, 1, size, size), data="normal", device=CUDA)["w"] for _ in range(12)]

    def chain(pause):
        x = first["x"].clone()
        for w in weights:
            y = torch.full_like(x, float("nan"))
            plan.execute(x, w, y)
            if pause:
                torch.cuda.synchronize()
            x = y
        return x

    expected = chain(pause=True)
    assert expected.isfinite().all()
    for _ in range(5):
        assert_same_bits(chain(pause=False), expected, "chain")


def test_every_length_finds_the_kernel():
    """S22: a new S makes a plan, and compiles nothing as long as the tile is the same."""
    problem = make_gemm((1, 5000, 1024, 64), device=CUDA)
    x, w = problem["x"], problem["w"]
    ops.gemm(x, w)
    compiled = KERNELS.stats().compiled
    PLANS.clear()
    for length in (5000, 4999, 4800):
        assert_same_bits(ops.gemm(x[:, :length], w), problem.expected()[:, :length], f"{length}")
    assert KERNELS.stats().compiled == compiled
    assert PLANS.stats().size == 3


@engines
def test_results_beyond_32_bit_offsets(engine):
    """S10: 2.3e9 elements; first, middle and last rows and the row at offset 2**31."""
    rows, n, k = 131072 + 77, 17408, 64
    plan = compiled_plan(engine, 8 * rows, (n, k))
    problem = make_gemm((1, rows, n, k), pads=(0, 0, 8), device=CUDA)
    done = run_guarded(problem, plan, "large")
    for first in (0, 2**31 // (n + 8), 2**31 // n, rows // 2, rows - 100):
        part = problem.with_(
            x=problem["x"][:, first : first + 100], y=done["y"][:, first : first + 100]
        )
        part.check()
    for first in range(0, rows, 8192):
        assert not done["y"][:, first : first + 8192].isnan().any()
