# SPDX-License-Identifier: Apache-2.0
"""The peers of a product with coded weights: cuBLAS on their values, quack on the codes.

quack-kernels 0.6.5 has ``gemm_w4a16`` for sm_90: weights in MXFP4, NVFP4 or MXFP8 become BF16 in
registers, in an order of their own that is made ahead. ``torch._scaled_mm`` is no peer: cuBLAS
takes block scales (16 or 32 codes) from compute capability 10.0 on, and codes on both sides.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from benchmarks.harness.arm import Arm, Launch, Role
from benchmarks.harness.memory import held
from cudnn_blocks.reference.scale_blobs import unpack_scales

if TYPE_CHECKING:
    from benchmarks.dequant_gemm.problem import DequantGemmProblem, Tensors

CUBLAS_BF16, QUACK = "cublas-bf16", "quack-w4a16"
WEIGHT_ONLY = "weight-only"
"""Variant whose peer multiplies codes too; the goals are about the other, whose peer is cuBLAS."""


def cublas_bf16(problem: DequantGemmProblem) -> Arm:
    """``torch.mm`` of the weights' values, into the result."""

    def bind(buffers: Tensors) -> Launch:
        x, w, y = (buffers[name] for name in ("x", "values", "y"))
        return partial(_product, x[0], w.t(), y[0])

    engine = f"torch.mm; {held(problem.value_bytes)}"
    return Arm(CUBLAS_BF16, Role.PEER, engine, bind)


def _product(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    torch.mm(x, w, out=y)


def quack(problem: DequantGemmProblem, sample: Tensors) -> Arm:
    """``gemm_w4a16`` with the tiles and splits it chooses; what it keeps for splits is its own."""
    module = import_module("quack.gemm_w4")
    block = problem.block

    def bind(buffers: Tensors) -> Launch:
        scales = unpack_scales(buffers["w_sf"], problem.n, problem.k // block.block_size)
        codes, strip = module.prepare_w4_weight(buffers["w"], scales, block.name)
        x, y = buffers["x"][0], buffers["y"][0]

        def multiply() -> None:
            module.gemm_w4a16(x, codes, strip, out=y, wformat=block.name)

        return multiply

    bind(sample)()
    engine = f"quack.gemm_w4; {held(problem.weight_bytes)}"
    return Arm(QUACK, Role.PEER, engine, bind, WEIGHT_ONLY)
