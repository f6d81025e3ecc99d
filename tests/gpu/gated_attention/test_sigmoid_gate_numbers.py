# SPDX-License-Identifier: Apache-2.0
"""The sigmoid gate on a GPU: numbers, every gate value, strides, sizes, launches in a row."""

from __future__ import annotations

import math

import pytest
import torch

from cudnn_blocks import ops
from cudnn_blocks.stages.kernel_cache import KERNELS
from tests.helpers.conv1d_problem import ulp_distance
from tests.helpers.pointwise_problem import DTYPES, assert_close, make_gate
from tests.helpers.tensors import assert_same_bits, clone_exact

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
BF16, FP16 = DTYPES


def assert_matches(actual, expected):
    """Within one rounding, and all but a few values the very same."""
    assert_close(actual, expected, "out")
    differ = int(((actual != expected) & ~actual.isnan()).sum())
    assert differ <= max(2, 0.01 * expected.numel()), f"{differ} values differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(16, 256), (7, 128), (3, 40), (1, 8), (5, 512)])
def test_against_the_reference(dtype, heads):
    for b, s in ((1, 1), (2, 37), (3, 128), (1, 515)):
        problem = make_gate((b, s, *heads), dtype=dtype, device=CUDA)
        expected, o = problem.expected(), problem["o"].clone()
        assert_matches(problem.run()["out"], expected)
        assert_same_bits(ops.sigmoid_gate(problem["o"], problem["gate"]), problem["out"], "out")
        assert_same_bits(problem["o"], o, "o")
        in_place = problem.with_(out=problem["o"]).run()
        assert_same_bits(in_place["o"], problem["out"], "in place")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_gate_value(dtype):
    """All 65536 of them, NaN payloads and infinities included, with three values of o."""
    pattern = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=CUDA).to(torch.int16)
    gate = pattern.view(dtype).view(1, 32, 8, 256)
    for value in (1.0, -3.14159, 1000.0):
        o = torch.full_like(gate, value)
        out = ops.sigmoid_gate(o, gate)
        exact = o.double() * torch.sigmoid(gate.double())
        assert torch.equal(out.isnan(), gate.isnan())
        good = ~gate.isnan() & (exact.abs() > 1e-30)
        assert int(ulp_distance(out[good], exact.to(dtype)[good]).max()) <= 1
        assert (out[good] != exact.to(dtype)[good]).float().mean() < 0.01
        small = ~gate.isnan() & ~good
        assert out[small].abs().max() <= 1e-30


def test_extremes():
    inf, nan = math.inf, math.nan
    rows = [  # o, gate, out
        (2.0, 0.0, 1.0),
        (2.0, inf, 2.0),
        (2.0, -inf, 0.0),
        (inf, 1.0, inf),
        (inf, -inf, nan),
        (2.0, nan, nan),
        (nan, 0.0, nan),
        (1.0, -3e38, 0.0),
    ]
    columns = (
        torch.tensor(c, dtype=BF16, device=CUDA).view(1, 1, 1, 8) for c in zip(*rows, strict=True)
    )
    o, gate, expected = columns
    torch.testing.assert_close(ops.sigmoid_gate(o, gate), expected, rtol=0, atol=0, equal_nan=True)


def test_gates_of_single_heads():
    """S20: a closed head gives 0, a head at 0 passes half; SiLU would give 0 there."""
    o = torch.randn(1, 3, 2, 256, device=CUDA).to(BF16)
    gate = torch.zeros_like(o)
    gate[:, :, 0] = -100
    out = ops.sigmoid_gate(o, gate)
    assert not out[:, :, 0].any()
    assert torch.equal(out[:, :, 1], 0.5 * o[:, :, 1])


def test_every_stride_that_the_contract_allows():
    b, s, h, d = 3, 41, 4, 64
    problem = make_gate((b, s, h, d), device=CUDA)
    expected = problem.expected()
    strides = [
        (s * h * d, d, s * d, 1),
        (s * h * 72, h * 72, 72, 1),
        (d, b * h * d, b * d, 1),
    ]

    def laid_out(x, stride):
        size = sum((n - 1) * step for n, step in zip(x.shape, stride, strict=True)) + 1
        memory = torch.zeros(size, dtype=BF16, device=CUDA)
        return memory.as_strided(x.shape, stride).copy_(x)

    for i, stride in enumerate(strides):
        others = [strides[(i + shift) % 3] for shift in (1, 2)]
        done = problem.with_(
            o=laid_out(problem["o"], stride),
            gate=laid_out(problem["gate"], others[0]),
            out=laid_out(torch.zeros_like(expected), others[1]),
        ).run()
        assert_matches(done["out"], expected)
    shared = problem["gate"][:, :1].expand(-1, s, -1, -1)
    problem = problem.with_(gate=shared)
    assert_matches(problem.run()["out"], problem.expected())


@pytest.mark.parametrize("name", ["o", "gate", "out"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_offsets_past_2_to_the_31_elements(name, axis):
    far = 2**31 + 64
    stride = [1024, 512, 64, 1]
    stride[axis] = far
    memory = torch.zeros(far + 4096, dtype=BF16, device=CUDA)
    problem = make_gate((2, 2, 2, 64), device=CUDA)
    expected = problem.expected()
    moved = memory.as_strided((2, 2, 2, 64), stride)
    if name != "out":
        moved.copy_(problem[name])
    done = problem.with_(**{name: moved}).run()
    assert_matches(done["out"], expected)
    if name == "out":
        moved.zero_()
        assert not memory.any(), "written elsewhere"


@pytest.mark.parametrize(("b", "s"), [(65536, 1), (70001, 1), (3, 70001)])
def test_many_batch_entries_and_tokens(b, s):
    problem = make_gate((b, s, 2, 16), device=CUDA)
    expected = problem.expected()
    assert_matches(problem.run()["out"], expected)


def test_one_plan_serves_every_shorter_length_and_smaller_batch():
    plan = make_gate((2, 8192, 4, 64), device=CUDA).plan()
    plan.compile()
    compiled = KERNELS.stats().compiled
    for b, s in ((2, 8192), (1, 8191), (2, 1), (1, 1000), (0, 5), (2, 0)):
        problem = make_gate((b, s, 4, 64), device=CUDA)
        expected = problem.expected()
        assert_matches(problem.run(plan)["out"], expected) if b * s else problem.run(plan)
    assert KERNELS.stats().compiled == compiled


def test_launches_in_a_row_wait_for_one_another():
    """In place, eight times over, in a graph."""
    problem = make_gate((1, 4096, 16, 256), in_place=True, device=CUDA)
    plan = problem.plan()
    plan.compile()
    start = problem["o"].clone()
    for _ in range(8):
        problem.run(plan)
        torch.cuda.synchronize()
    apart = clone_exact(problem["o"])
    problem["o"].copy_(start)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            problem.run(plan)
    graph.replay()
    assert_same_bits(problem["o"], apart, "o")
