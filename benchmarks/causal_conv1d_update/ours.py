# SPDX-License-Identifier: Apache-2.0
"""Our arms of the update."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.harness.arm import Arm, Launch, Role

if TYPE_CHECKING:
    from benchmarks.causal_conv1d_update.problem import Buffers


def plan_arm(
    sample: Buffers, *, on_bad_index: str | None = None, name: str = "ours", variant: str = ""
) -> Arm:
    """The compiled plan's ``execute``, called bare.

    Args:
        sample: fixes shapes, dtypes and layouts.
        on_bad_index: None leaves the indices away, ``trap`` and ``report`` give them.
        name: the arm's name.
        variant: the arm's variant.
    """
    from cudnn_blocks import CausalConv1dGeometry, CausalConv1dUpdate

    channels, width = sample.weight.shape
    plan = CausalConv1dUpdate(
        sample.x,
        sample.conv_state,
        sample.weight,
        sample.out,
        CausalConv1dGeometry(channels, width, sample.conv_state.shape[2]),
        sample_conv_state_indices=sample.conv_state_indices if on_bad_index else None,
        activation="silu",
        on_bad_index=on_bad_index or "trap",
    )
    plan.check_support()
    plan.compile()
    engine = ", ".join(str(stage.engine) for stage in plan.probe().stages)

    def bind(buffers: Buffers) -> Launch:
        optional = {}
        if on_bad_index:
            optional["conv_state_indices"] = buffers.conv_state_indices
        if on_bad_index == "report":
            optional["status"] = buffers.status
        return partial(
            plan.execute, buffers.x, buffers.conv_state, buffers.weight, buffers.out, **optional
        )

    return Arm(name, Role.OURS, engine, bind, variant, plan.describe())


def functional_arm(sample: Buffers, variant: str) -> Arm:
    """The functional op, which allocates its output."""
    from cudnn_blocks import ops

    engine = f"{plan_arm(sample).engine}, plan cache"
    ops.causal_conv1d_update(sample.x, sample.conv_state, sample.weight, activation="silu")

    def bind(buffers: Buffers) -> Launch:
        return partial(
            ops.causal_conv1d_update,
            buffers.x,
            buffers.conv_state,
            buffers.weight,
            activation="silu",
        )

    return Arm("ours-op", Role.OURS, engine, bind, variant)
