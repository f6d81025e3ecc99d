# SPDX-License-Identifier: Apache-2.0
"""The gated attention block in its precision modes against our own BF16 block, and its FP8 stages.

``block/`` is the layer: each mode, fused where it can be, against the fused BF16 block on the
dequantised operands. Bytes of weights and workspace stand beside the engines of every arm.
``gemm/`` is a projection of codes against ``torch._scaled_mm``, ``sdpa/`` their attention against
FlashAttention-3's, ``quantize/`` what makes codes of an operand, against ``torch.compile``. Cheap
cases come first: the file is written after every one.
"""

from __future__ import annotations

from benchmarks.gated_attention_precision import cases
from benchmarks.gated_attention_precision.bench import (
    Fp8GemmCase,
    Fp8SdpaCase,
    PrecisionBlockCase,
    QuantizeCase,
)
from benchmarks.harness.case import Bench

BENCH = Bench(
    name="gated_attention_precision",
    cases=(
        *(QuantizeCase(problem) for problem in cases.QUANTIZE),
        *(Fp8GemmCase(problem) for problem in cases.GEMM),
        *(Fp8SdpaCase(problem) for problem in cases.SDPA),
        *(PrecisionBlockCase(problem) for problem in cases.BLOCK),
    ),
    peer_distributions=("torch", "triton", "fa3-fwd"),
    goals=cases.GOALS,
)
