# SPDX-License-Identifier: Apache-2.0
"""The quantising kernels give the bits of the reference, on every path and at every size."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cudnn_blocks import QuantizeFp8, ops
from cudnn_blocks.quant_spec import BLOCK_FORMATS, E4M3
from cudnn_blocks.reference import quantize as reference
from tests.helpers.quantize_problem import (
    QuantizeProblem,
    make_blocks,
    make_codes,
    make_fp8,
    same_numbers,
)
from tests.helpers.tensors import assert_same_bits

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
DEVICE = "cuda"
formats = pytest.mark.parametrize("fmt", BLOCK_FORMATS)
SHAPES = [
    (2, 37, 3, 96),
    (1, 1, 1, 32),
    (3, 128, 1, 64),
    (2, 129, 16, 256),
    (1, 1000, 2, 512),
    (130, 160),
    (1, 2048),
    (1023, 4096),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
in_hardware = pytest.mark.parametrize("has_cvt", [True, False], ids=["cvt", "integers"])


def run(problem: QuantizeProblem, has_cvt: bool = True) -> None:
    """Runs the problem on the GPU and compares it, bit for bit, with the reference on the CPU."""
    expected = problem.expected()
    plan = problem.plan()
    plan.check_support()
    (stage,) = plan._stages
    assert stage.engine == "portable"
    if not has_cvt:  # what older architectures run
        stage._config = dataclasses.replace(stage._config, has_cvt=False)
    plan.compile()
    problem.run(plan)
    torch.cuda.synchronize()
    for name in problem.written:
        if name == "y":
            assert same_numbers(problem["y"], expected["y"]).all()
        else:
            assert_same_bits(problem[name], expected[name], name)


@shapes
@in_hardware
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_fp8(shape, dtype, has_cvt):
    run(make_fp8(shape, dtype=dtype, is_wild=True, device=DEVICE), has_cvt)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scale", [1.0, 0.37, 448.0, 2.0**-9, 1e-4, 1e30])
@in_hardware
def test_fp8_of_every_pattern(dtype, scale, has_cvt):
    pattern = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = pattern.view(dtype).view(256, 256).to(DEVICE)
    codes = torch.zeros(256, 256, dtype=torch.uint8, device=DEVICE).view(E4M3)
    run(QuantizeProblem(QuantizeFp8, {"x": x, "codes": codes}, {"scale": scale}), has_cvt)


@shapes
@formats
@pytest.mark.parametrize("is_wild", [False, True])
@in_hardware
def test_blocks(fmt, shape, is_wild, has_cvt):
    run(make_blocks(fmt, shape, is_wild=is_wild, device=DEVICE), has_cvt)


@shapes
@formats
@in_hardware
def test_back(fmt, shape, has_cvt):
    run(make_codes(fmt, shape, device=DEVICE), has_cvt)


@pytest.mark.parametrize("shape", [(2, 37, 3, 48), (1, 1, 1, 16), (2, 129, 2, 256), (1, 70, 2, 80)])
@pytest.mark.parametrize("is_wild", [False, True])
@in_hardware
def test_blocks_along_tokens(shape, is_wild, has_cvt):
    make = {"along_tokens": True, "device": DEVICE}
    run(make_blocks("mxfp8", shape, is_wild=is_wild, **make), has_cvt)
    lens = [shape[1], 0][: shape[0]]
    run(make_blocks("mxfp8", shape, is_wild=is_wild, seq_lens=lens, **make), has_cvt)
    lens = [max(shape[1] - 5, 0), 33][: shape[0]]
    run(make_blocks("mxfp8", shape, is_wild=is_wild, seq_lens=lens, **make), has_cvt)
    run(make_codes("mxfp8", shape, **make), has_cvt)


@in_hardware
def test_every_nvfp4_scale_with_every_smaller_number(has_cvt):
    """The reciprocal of the hardware is not exact; no quotient may fall on the other side."""
    numbers = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(BF16)
    codes = reference.encode_scales(numbers.float(), BLOCK_FORMATS["nvfp4"])
    blocks = []
    for code in codes.unique():
        for amax in numbers[codes == code][[0, -1]]:
            near = numbers[(numbers <= amax) & (numbers.float() >= amax.float() / 64)]
            near = torch.cat([near, -near])
            padding = -len(near) % 15
            near = torch.cat([near, near.new_zeros(padding)]).view(-1, 15)
            blocks.append(torch.cat([amax.expand(len(near), 1), near], 1))
    flat = torch.cat(blocks)
    flat = torch.cat([flat, flat.new_zeros(-len(flat) % 16, 16)])
    problem = make_blocks("nvfp4", (flat.numel() // 256, 256), device=DEVICE)
    problem["x"].copy_(flat.view(-1, 256).to(DEVICE))
    run(problem, has_cvt)


@pytest.mark.parametrize("axis", [0, 1])
def test_strides_past_two_to_the_31(axis):
    far = 2**31 + 64
    memory = torch.zeros(far + 2**20, dtype=BF16, device=DEVICE)
    strides = [20000, 9000, 128, 1]
    strides[axis] = far
    problem = make_blocks("nvfp4", (2, 2, 3, 64), device=DEVICE)
    x = memory.as_strided((2, 2, 3, 64), strides).copy_(problem["x"])
    run(problem.with_(x=x))
    problem = make_fp8((2, 2, 3, 64), device=DEVICE)
    x.copy_(problem["x"])
    wide = torch.zeros(far + 2**20, dtype=torch.uint8, device=DEVICE).view(E4M3)
    run(problem.with_(x=x, codes=wide.as_strided((2, 2, 3, 64), strides)))


def test_a_chain_in_a_graph():
    """Each launch may start before the last one ends: it must still read what that wrote."""
    x = torch.randn(2, 1000, 16, 256, device=DEVICE, dtype=BF16)

    def chain(x):
        for fmt in ("mxfp8", "nvfp4", "mxfp4"):
            x = ops.dequantize_block(*ops.quantize_block(x, fmt), fmt)
        return x

    expected = x
    for fmt in ("mxfp8", "nvfp4", "mxfp4"):
        codes, scales = ops.quantize_block(expected, fmt)
        torch.cuda.synchronize()
        expected = ops.dequantize_block(codes, scales, fmt)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(x)
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(y, expected, "y")
