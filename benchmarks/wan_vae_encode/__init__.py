# SPDX-License-Identifier: Apache-2.0
"""``encode`` of the WAN 2.2 video VAE as diffusers runs it, with and without acceleration."""

from __future__ import annotations

from benchmarks.harness.case import Bench
from benchmarks.harness.environment import TORCH_CUDNN
from benchmarks.harness.goals import Goal
from benchmarks.wan_vae_encode.bench import EAGER, EncodeCase
from benchmarks.wan_vae_encode.problem import EncodeProblem

FRAMES = (1, 17, 81)

BENCH = Bench(
    name="wan_vae_encode",
    cases=(
        *(EncodeCase(EncodeProblem(frames)) for frames in FRAMES),
        *(EncodeCase(EncodeProblem(frames), only=EAGER) for frames in FRAMES),
    ),
    peer_distributions=("diffusers", "torch", TORCH_CUDNN, "triton"),
    goals=(
        Goal("encode/wan-2.2/704x1280x17", 1.7),
        Goal("encode/wan-2.2-eager/704x1280x17", 2.8),
        Goal("encode/wan-2.2-eager/704x1280x1", 4.0),
    ),
)
