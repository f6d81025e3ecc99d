# SPDX-License-Identifier: Apache-2.0
"""The arm that host rows are related to."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.harness.arm import Arm, Role

TRIVIAL = "trivial-tvm-ffi"


def trivial_arm() -> Arm:
    """One launch of a kernel that stores one word, through the calling convention of ours."""
    from benchmarks.trivial_launch import compile_trivial

    function = compile_trivial()
    target = torch.zeros(1, dtype=torch.int32, device="cuda")
    function(target)
    if target.item() != 1:
        raise AssertionError(f"the trivial launch wrote {target.item()}, expected 1")
    return Arm(TRIVIAL, Role.YARDSTICK, "cute-dsl", lambda _: partial(function, target))
