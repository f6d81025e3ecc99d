# SPDX-License-Identifier: Apache-2.0
"""The QK-RMSNorm and RoPE stage: engines, compile, launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cudnn_blocks.reference.qk_norm_rope import qk_norm_rope
from cudnn_blocks.stages.capabilities import Capabilities, Constraint, OneOf
from cudnn_blocks.stages.constraints import MultipleOf, UpTo
from cudnn_blocks.stages.gated_attention.evidence import EVIDENCE
from cudnn_blocks.stages.kernel_stage import KernelChoice, KernelStage
from cudnn_blocks.stages.qk_norm_rope import portable_config
from cudnn_blocks.stages.stage import REFERENCE
from cudnn_blocks.stages.toolchain import DslRequirement
from cudnn_blocks.target import GPU_TARGET_NAMES, Target

PORTABLE = "portable"
D_HEAD_MULTIPLE = 8
MAX_D_HEAD = 512
MAX_BATCH_HEADS = 2**31 - 2**16
"""Heads of Q and K in one batch, which the kernel numbers in 32 bits."""

_SERVED: dict[str, Constraint] = {
    "dtype": OneOf(("bf16", "fp16")),
    "d_head": MultipleOf(D_HEAD_MULTIPLE, MAX_D_HEAD),
}


@dataclass(frozen=True)
class QkNormRopeModes:
    """Compile-time facts."""

    dtype: str
    """``bf16`` or ``fp16``."""
    h_q: int
    h_kv: int
    d_head: int
    rope_dim: int
    """Leading channels that rotate, even; 0 for none."""
    has_norm: bool


class QkNormRopeStage(KernelStage):
    """One launch that norms and rotates Q and K in place.

    Operands: q ``[B, S, h_q, D]``, k ``[B, S, h_kv, D]``, w_q_norm and w_k_norm ``[D]`` or None,
    cos and sin ``[B, T, rope_dim]`` or None. What the modes have no use for may be given all the
    same and is not read.

    Args:
        modes: compile-time facts; a norm or a rotation, or both.
        eps: added to the mean square; an argument of the kernel, not compiled in.
        max_seq_len: the largest S.
        target: what to compile for.
        engine: pin.
    """

    name = "qk_norm_rope"
    rows = (
        Capabilities(
            engine=PORTABLE,
            targets=OneOf(GPU_TARGET_NAMES),
            serves={**_SERVED, "batch_heads": UpTo(MAX_BATCH_HEADS)},
            dsl=DslRequirement((4, 8, 1)),
            evidence=EVIDENCE,
        ),
        Capabilities(
            engine=REFERENCE,
            targets=OneOf(("cpu",)),
            serves=_SERVED,
            evidence={"cpu": "tests/unit/test_qk_norm_rope_reference.py"},
        ),
    )

    def __init__(
        self,
        modes: QkNormRopeModes,
        eps: float,
        max_seq_len: int,
        target: Target,
        engine: str | None = None,
    ) -> None:
        facts = {
            "dtype": modes.dtype,
            "d_head": modes.d_head,
            "batch_heads": max_seq_len * (modes.h_q + modes.h_kv),
        }
        super().__init__(facts, target, engine)
        self.modes = modes
        self.eps = eps

    def _choose_kernel(self) -> KernelChoice:
        config = portable_config.QkNormRopeConfig.from_geometry(
            self.target, **dataclasses.asdict(self.modes)
        )
        return KernelChoice(
            "cudnn_blocks.stages.qk_norm_rope.portable.QkNormRopeKernel",
            config,
            portable_config.smem_bytes(config),
        )

    def _kernel_operands(self, operands: Sequence[Any]) -> Sequence[Any]:
        q, k, w_q_norm, w_k_norm, cos, sin = operands
        if not self.modes.has_norm:
            w_q_norm = w_k_norm = None
        if self.modes.rope_dim == 0:
            cos = sin = None
        return q, k, w_q_norm, w_k_norm, cos, sin, self.eps

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        qk_norm_rope(*self._kernel_operands(operands))

    def describe(self) -> str:
        """Sizes that are compiled in."""
        modes = self.modes
        parts = [
            modes.dtype,
            f"heads {modes.h_q}+{modes.h_kv}",
            f"D={modes.d_head}",
            f"rope_dim={modes.rope_dim}" if modes.rope_dim else "no RoPE",
            f"norm (eps {self.eps:g})" if modes.has_norm else "no norm",
        ]
        return ", ".join([*parts, "allocates"] if self.engine == REFERENCE else parts)
