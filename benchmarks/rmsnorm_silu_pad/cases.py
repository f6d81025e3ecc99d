# SPDX-License-Identifier: Apache-2.0
"""Where the norm stands on its own in the WAN 2.2 encoder at 704x1280, as data.

``plain`` opens a clip, ``history`` goes on with it, ``residual`` also takes the bias of the
convolution before, a residual and keeps their sum, as behind layers whose norm cannot be fused.
"""

from __future__ import annotations

from benchmarks.harness.goals import Goal
from benchmarks.rmsnorm_silu_pad.problem import NormProblem

LARGE = (160, 352, 640, 4)
PROBLEMS = (
    NormProblem("plain", *LARGE, is_tuned=True),
    NormProblem("history", *LARGE, history_frames=2, is_tuned=True),
    NormProblem("residual", *LARGE, history_frames=2, has_residual=True, is_tuned=True),
    NormProblem("plain", 160, 352, 640, 1),
    NormProblem("residual", 320, 176, 320, 4, history_frames=2, has_residual=True),
    NormProblem("residual", 640, 88, 160, 2, history_frames=2, has_residual=True),
    NormProblem("residual", 640, 44, 80, 1, history_frames=2, has_residual=True),
)

GOALS = (Goal("kernel/*/C160-T4-352x640", 0.85, "share"),)
"""Of the copy bandwidth, on an H200."""
