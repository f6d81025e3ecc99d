# SPDX-License-Identifier: Apache-2.0
"""The peers: FlashAttention-3 and cuBLAS on codes, compiled quantisers; cuBLAS in BF16 beside them.

``torch._scaled_mm`` takes one scale a tensor here. With ``use_fast_accum`` all of K stays in the
tensor cores; without it cuBLAS adds partial sums in FP32.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from benchmarks.gated_attention_block import data
from benchmarks.gated_attention_block.peers import COMPILED, cublas
from benchmarks.gated_attention_precision.sdpa_problem import CODES
from benchmarks.harness.arm import Arm, Launch, Role
from benchmarks.harness.inductor import compiled, inductor_words
from benchmarks.harness.memory import held

if TYPE_CHECKING:
    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.gated_attention_precision.gemm_problem import Fp8GemmProblem
    from benchmarks.gated_attention_precision.quantize_problem import QuantizeProblem
    from benchmarks.gated_attention_precision.sdpa_problem import Fp8SdpaProblem

FA3_FP8, CUBLAS_BF16 = "fa3-fp8", "cublas-bf16"
SCALED_MM_FAST, SCALED_MM_PROMOTED = "scaled-mm-fast", "scaled-mm"
SCALED_MM = {SCALED_MM_FAST: True, SCALED_MM_PROMOTED: False}
"""Arm to ``use_fast_accum``."""


def scaled_mm(problem: Fp8GemmProblem, sample: Tensors, name: str, variant: str) -> Arm:
    """``torch._scaled_mm`` into the result."""
    is_fast = SCALED_MM[name]

    def bind(buffers: Tensors) -> Launch:
        x, w, y = buffers["x8"][0], buffers["w8"].t(), buffers["y"][0]
        scales = (buffers["descale_x"], buffers["descale_w"])

        def multiply() -> None:
            torch._scaled_mm(x, w, *scales, out_dtype=data.DTYPE, use_fast_accum=is_fast, out=y)

        return multiply

    bind(sample)()
    engine = f"torch._scaled_mm, use_fast_accum={is_fast}; {held(problem.weight_bytes)}"
    return Arm(name, Role.PEER, engine, bind, variant)


def cublas_bf16(problem: Fp8GemmProblem) -> Arm:
    """The same values in BF16: what codes gain; no peer, as goals are about products of codes."""
    arm = cublas()
    engine = f"{arm.engine}; {held(data.ELEMENT_BYTES * problem.weight_bytes)}"
    return replace(arm, name=CUBLAS_BF16, role=Role.YARDSTICK, engine=engine)


def compiled_quantizer(problem: QuantizeProblem) -> Arm:
    """The reference's steps under Inductor, into the results."""
    function = compiled(problem.quantize)

    def bind(buffers: Tensors) -> Launch:
        results = {name: one for name, one in buffers.items() if name != "x"}
        return partial(function, buffers["x"], results)

    return Arm(COMPILED, Role.PEER, inductor_words(is_tuned=False), bind)


def flash_attention_3(problem: Fp8SdpaProblem, sample: Tensors) -> Arm:
    """The forward-only package, on codes; its descales are 1 where none are given."""
    function = import_module("fa3_fwd_interface").flash_attn_func
    scale, is_causal = problem.geometry.scale, problem.geometry.is_causal

    def bind(buffers: Tensors) -> Launch:
        q, k, v = (buffers[name] for name in CODES.values())

        def attend() -> Tensors:
            found = function(q, k, v, softmax_scale=scale, causal=is_causal)
            return {"o": found[0] if isinstance(found, (tuple, list)) else found}

        return attend

    bind(sample)()
    return Arm(FA3_FP8, Role.PEER, "fa3_fwd", bind)
