# SPDX-License-Identifier: Apache-2.0
"""The decode convolution update against FLA, cudnn-frontend and torch.

Kernel rows walk distinct buffer sets in one CUDA graph; host rows time eager calls at N = 1 beside
a trivial TVM-FFI launch; the compile row counts ``cute.compile`` over a sweep of batch sizes.
"""

from __future__ import annotations

from benchmarks.causal_conv1d_update import cases
from benchmarks.causal_conv1d_update.bench import (
    CompileCountCase,
    HostCase,
    IndexedCase,
    UpdateCase,
)
from benchmarks.harness.case import Bench

BENCH = Bench(
    name="causal_conv1d_update",
    cases=(
        CompileCountCase(),
        *(HostCase(problem) for problem in cases.HOST_PROBLEMS),
        *(IndexedCase(problem) for problem in cases.INDEXED_PROBLEMS),
        *(UpdateCase(problem) for problem in cases.PROBLEMS),
    ),
    peer_distributions=("flash-linear-attention", "nvidia-cudnn-frontend", "triton", "torch"),
)
