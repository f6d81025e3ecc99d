# SPDX-License-Identifier: Apache-2.0
"""The convolutions of a video VAE's encoder against cuDNN and torch.compile.

``bare/`` is the convolution alone, ``fused/`` the whole layer, ``hint/`` a layer whose leading
planes are zero, ``causal/`` the streaming first layer. Cheap cases come first: the file is written
after every one.
"""

from __future__ import annotations

from benchmarks.conv3d import cases
from benchmarks.conv3d.bench import BareCase, CausalCase, FusedCase, HintCase
from benchmarks.harness.case import Bench
from benchmarks.harness.environment import TORCH_CUDNN

BENCH = Bench(
    name="conv3d",
    cases=(
        *(BareCase(problem) for problem in cases.BARE),
        *(CausalCase(problem) for problem in cases.CAUSAL),
        *(HintCase(problem) for problem in cases.HINT),
        *(FusedCase(problem) for problem in cases.FUSED),
    ),
    peer_distributions=("torch", TORCH_CUDNN, "triton"),
    goals=cases.GOALS,
)
