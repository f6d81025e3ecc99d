# SPDX-License-Identifier: Apache-2.0
"""The sigmoid gate stage: engines, compile, launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cudnn_blocks.reference.sigmoid_gate import sigmoid_gate
from cudnn_blocks.stages.capabilities import Capabilities, Constraint, OneOf
from cudnn_blocks.stages.constraints import MultipleOf, UpTo
from cudnn_blocks.stages.gate import portable_config
from cudnn_blocks.stages.gated_attention.evidence import EVIDENCE
from cudnn_blocks.stages.kernel_stage import KernelChoice, KernelStage
from cudnn_blocks.stages.stage import REFERENCE
from cudnn_blocks.stages.toolchain import DslRequirement
from cudnn_blocks.target import GPU_TARGET_NAMES, Target

PORTABLE = "portable"
VEC = 8
MAX_D_HEAD = 512
MAX_BATCH_VECS = 2**31 - 2**16
"""Vectors of 8 channels in one batch, which the kernel numbers in 32 bits."""

_SERVED: dict[str, Constraint] = {
    "dtype": OneOf(("bf16", "fp16")),
    "d_head": MultipleOf(VEC, MAX_D_HEAD),
}


@dataclass(frozen=True)
class SigmoidGateModes:
    """Compile-time facts."""

    dtype: str
    """``bf16`` or ``fp16``."""
    h_q: int
    d_head: int


class SigmoidGateStage(KernelStage):
    """One launch; operands o, gate, out, each ``[B, S, h_q, D]``; out may be o.

    Args:
        modes: compile-time facts.
        max_seq_len: the largest S.
        target: what to compile for.
        engine: pin.
    """

    name = "sigmoid_gate"
    rows = (
        Capabilities(
            engine=PORTABLE,
            targets=OneOf(GPU_TARGET_NAMES),
            serves={**_SERVED, "batch_vecs": UpTo(MAX_BATCH_VECS)},
            dsl=DslRequirement((4, 8, 1)),
            evidence=EVIDENCE,
        ),
        Capabilities(
            engine=REFERENCE,
            targets=OneOf(("cpu",)),
            serves=_SERVED,
            evidence={"cpu": "tests/unit/test_sigmoid_gate_reference.py"},
        ),
    )

    def __init__(
        self, modes: SigmoidGateModes, max_seq_len: int, target: Target, engine: str | None = None
    ) -> None:
        facts = {
            "dtype": modes.dtype,
            "d_head": modes.d_head,
            "batch_vecs": max_seq_len * modes.h_q * modes.d_head // VEC,
        }
        super().__init__(facts, target, engine)
        self.modes = modes

    def _choose_kernel(self) -> KernelChoice:
        config = portable_config.SigmoidGateConfig.from_geometry(
            self.target, **dataclasses.asdict(self.modes)
        )
        return KernelChoice(
            "cudnn_blocks.stages.gate.portable.SigmoidGateKernel",
            config,
            portable_config.smem_bytes(config),
        )

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        sigmoid_gate(*operands)

    def describe(self) -> str:
        """Sizes that are compiled in."""
        modes = self.modes
        parts = [modes.dtype, f"h_q={modes.h_q}", f"D={modes.d_head}"]
        return ", ".join([*parts, "allocates"] if self.engine == REFERENCE else parts)
