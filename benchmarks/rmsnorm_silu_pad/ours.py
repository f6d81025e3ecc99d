# SPDX-License-Identifier: Apache-2.0
"""Our arm of the norm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.harness.arm import Arm, Launch, Role
from cudnn_blocks import RmsNormSiluPad

if TYPE_CHECKING:
    from benchmarks.rmsnorm_silu_pad.problem import Tensors


def norm_plan(sample: Tensors, target: Any = None) -> RmsNormSiluPad:
    """The unchecked plan; the samples are on ``meta`` where a target is given."""
    return RmsNormSiluPad(
        *(sample.get(name) for name in RmsNormSiluPad.operand_names), target=target
    )


def norm_arm(sample: Tensors) -> Arm:
    """The compiled plan's ``execute``, called bare."""
    plan = norm_plan(sample)
    plan.compile()
    engine = ", ".join(str(stage.engine) for stage in plan.probe().stages)

    def bind(buffers: Tensors) -> Launch:
        return partial(plan.execute, *(buffers.get(name) for name in plan.operand_names))

    return Arm("ours", Role.OURS, engine, bind, description=plan.describe())
