# SPDX-License-Identifier: Apache-2.0
"""Gated attention op by op and whole, against cuBLAS, torch.compile and other attentions.

``gemm/`` is a projection, ``sdpa/`` the attention, ``pointwise/`` norm with RoPE and the gate,
``block/`` the layer against chains of peers, ``host/`` the host time of a call. Cheap cases come
first: the file is written after every one.
"""

from __future__ import annotations

from benchmarks.gated_attention_block import cases
from benchmarks.gated_attention_block.bench import (
    BlockCase,
    GateCase,
    GemmCase,
    HostCase,
    NormRopeCase,
    SdpaCase,
)
from benchmarks.harness.case import Bench
from benchmarks.harness.environment import TORCH_CUDNN

BENCH = Bench(
    name="gated_attention_block",
    cases=(
        *(HostCase(problem) for problem in cases.HOST),
        *(NormRopeCase(problem) for problem in cases.NORM_ROPE),
        *(GateCase(problem) for problem in cases.GATE),
        *(GemmCase(problem) for problem in cases.GEMM),
        *(SdpaCase(problem) for problem in cases.SDPA),
        *(BlockCase(problem) for problem in cases.BLOCK),
    ),
    peer_distributions=(
        "torch",
        TORCH_CUDNN,
        "triton",
        "flash-attn-4",
        "quack-kernels",
        "fa3-fwd",
        "nvidia-cudnn-frontend",
    ),
    goals=cases.GOALS,
)
