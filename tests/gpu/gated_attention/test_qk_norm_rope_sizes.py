# SPDX-License-Identifier: Apache-2.0
"""QK norm and RoPE on a GPU: offsets past 2^31, many batch entries, launches in a row."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import QkNormRope, ops
from tests.helpers.pointwise_problem import QkProblem, assert_heads, make_qk
from tests.helpers.tensors import assert_same_bits

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16


def call(problem: QkProblem) -> QkProblem:
    ops.qk_norm_rope(*problem.operands.values(), qk_norm_eps=problem.eps)
    return problem


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_offsets_past_2_to_the_31_elements(axis):
    """Batch, token or head 1 lies 2^31 elements and more after its predecessor."""
    shape = [2, 2, 2, 64]
    far = 2**31 + 64
    stride = [1024, 512, 64, 1]
    stride[axis] = far
    memory = torch.zeros(far + 8192, dtype=BF16, device=CUDA)
    problem = make_qk((2, 2, 2, 2, 64), 16, in_slab=False, device=CUDA)
    expected = problem.expected()
    q, k = (memory.as_strided(shape, stride, start) for start in (0, 4096))
    q.copy_(problem["q"])
    k.copy_(problem["k"])
    assert_heads(call(problem.with_(q=q, k=k)), expected)
    rest = memory.clone()
    for x, start in ((q, 0), (k, 4096)):
        rest.as_strided(shape, stride, start).zero_()
        assert x.abs().sum() > 0
    assert not rest.any(), "written elsewhere"


def test_tables_past_2_to_the_31_elements():
    far = 2**31 + 64
    memory = torch.zeros(far + 4096, dtype=BF16, device=CUDA)
    problem = make_qk((2, 5, 2, 1, 64), 16, device=CUDA)
    expected = problem.expected()
    tables = {
        name: memory.as_strided((2, 8, 16), (far, 16, 1), start).copy_(problem[name])
        for name, start in (("cos", 0), ("sin", 2048))
    }
    assert_heads(call(problem.with_(**tables)), expected)


def test_more_than_2_to_the_31_elements():
    b, s, h, d = 1, 2**17, 63, 264
    assert b * s * h * d > 2**31
    q = torch.empty(b, s, h, d, dtype=BF16, device=CUDA).uniform_(-1, 1)
    problem = make_qk((b, s, 1, 1, d), 64, in_slab=False, is_expanded=True, device=CUDA)
    tail = {"q": q[:, -3:].clone(), "k": problem["k"][:, -3:].clone()}
    tail |= {name: problem[name][:, s - 3 : s] for name in ("cos", "sin")}
    call(problem.with_(q=q))
    done = call(problem.with_(**tail))
    assert_same_bits(q[:, -3:], done["q"], "the last tokens")


@pytest.mark.parametrize(("b", "s"), [(65536, 1), (70001, 1), (3, 70001)])
def test_many_batch_entries_and_tokens(b, s):
    problem = make_qk((b, s, 2, 1, 16), 8, in_slab=False, spare_rows=0, device=CUDA)
    expected = problem.expected()
    assert_heads(call(problem), expected)


def test_launches_in_a_row_wait_for_one_another():
    """In place, eight times over, in a graph: each launch reads what the one before wrote."""
    problem = make_qk((1, 4096, 16, 2, 256), 64, device=CUDA)
    plan = problem.plan()
    plan.compile()
    apart = problem.clone()
    for _ in range(8):
        apart.run(plan)
        torch.cuda.synchronize()
    in_graph = problem.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            in_graph.run(plan)
    graph.replay()
    for name in ("q", "k"):
        assert_same_bits(in_graph[name], apart[name], name)


def test_a_plan_for_specs_of_other_strides_takes_a_slab():
    problem = make_qk((2, 37, 16, 2, 256), 64, device=CUDA)
    compact = make_qk((2, 64, 16, 2, 256), 64, in_slab=False, device=CUDA)
    plan = QkNormRope(*compact.operands.values())
    plan.compile()
    expected = problem.expected()
    assert_heads(problem.run(plan), expected)
