# SPDX-License-Identifier: Apache-2.0
"""The cuDNN engine of attention where cudnn-frontend is installed; elsewhere its decline."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import NotServedError
from cudnn_blocks.stages.cudnn_graph import frontend_version
from tests.helpers.sdpa_gpu import CUDA, D_HEADS
from tests.helpers.sdpa_problem import assert_matches, make_problem
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
PIN = {"sdpa": "cudnn"}
MASKS = {
    "causal": {},
    "full": {"is_causal": False},
    "bottom-right": {"causal_bottom_right": True, "sk": 200},
    "window": {"window_left": 40},
}


@pytest.mark.parametrize("d_head", D_HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_numbers(mask, d_head):
    for dtype in (torch.bfloat16, torch.float16):
        options = {"sk": 130, "is_slab": mask == "causal", **MASKS[mask]}
        problem = make_problem(2, 130, d_head=d_head, dtype=dtype, device=CUDA, **options)
        if frontend_version() is None:
            with pytest.raises(NotServedError, match="cudnn: cudnn_frontend=None"):
                problem.compiled(engines=PIN)
            return
        plan = problem.compiled(engines=PIN)
        assert_matches(problem.run(plan), problem.expected(), plan.describe())


def test_capture_on_a_stream_that_ran():
    problem = make_problem(2, 130, d_head=128, device=CUDA)
    if frontend_version() is None:
        with pytest.raises(NotServedError, match="cudnn: cudnn_frontend=None"):
            problem.compiled(engines=PIN)
        return
    plan = problem.compiled(engines=PIN)
    expected = problem.clone().run(plan)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        problem.run(plan)
    with torch.cuda.graph(graph, stream=side):
        problem.run(plan)
    problem["o"].zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(problem["o"], expected["o"], "o")
