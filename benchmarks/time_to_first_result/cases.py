# SPDX-License-Identifier: Apache-2.0
"""What is served first, as lines of a deploy file, and what has to come of it."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.goals import Goal

BUNDLE = "ours from a bundle"

CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "gated_attention_block",
        "Qwen3-Next B1 S4096, fuse_norm_rope, fuse_gate",
        {
            "op": "gated-attention-block",
            "d_model": 2048,
            "h_q": 16,
            "h_kv": 2,
            "tokens": 4096,
            "fuse_norm_rope": True,
            "fuse_gate": True,
        },
    ),
    (
        "conv3d_rmsnorm_silu_pad",
        "6x90x162 320->320, add",
        {
            "op": "conv3d-rmsnorm-silu-pad",
            "frames": 6,
            "height": 90,
            "width": 162,
            "in_channels": 320,
            "out_channels": 320,
            "residual": "add",
        },
    ),
)
"""Case, shape, plan."""

GOALS = (Goal("first/*", 4.0, arm=BUNDLE),)
"""A bundle takes at most a quarter of the cold time."""
