# SPDX-License-Identifier: Apache-2.0
"""The cuDNN engine of the product where cudnn-frontend is installed; elsewhere its decline."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import Gemm, NotServedError
from cudnn_blocks.stages.cudnn_graph import frontend_version
from tests.helpers.gemm_gpu import CUDA
from tests.helpers.gemm_problem import DTYPES, make_gemm
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
PIN = {"gemm": "cudnn"}


def plan_of(problem) -> Gemm | None:
    """A compiled plan, or None where the engine has to decline, which it does."""
    plan = problem.plan(engines=PIN)
    if frontend_version() is None:
        with pytest.raises(NotServedError, match="cudnn: cudnn_frontend=None"):
            plan.check_support()
        return None
    plan.compile()
    assert "plan eng" in plan.describe()
    return plan


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows(dtype):
    plan = plan_of(make_gemm((2, 150, 520, 512), dtype=dtype, device=CUDA))
    for tokens in ((2, 150), (1, 150), (2, 1), (1, 1), (2, 63), (1, 149)):
        problem = make_gemm((*tokens, 520, 512), dtype=dtype, device=CUDA)
        if plan is not None:
            problem.run(plan).check()


def test_capture_on_a_new_stream():
    problem = make_gemm((2, 150, 520, 512), device=CUDA)
    plan = plan_of(problem)
    if plan is None:
        return
    expected = problem.clone().run(plan)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        problem.run(plan)
    problem["y"].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(problem["y"], expected["y"], "y")
