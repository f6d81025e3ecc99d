# SPDX-License-Identifier: Apache-2.0
"""The causal conv1d update stage: engines, compile, launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cudnn_blocks.geometry import CausalConv1dGeometry
from cudnn_blocks.reference import causal_conv1d as reference
from cudnn_blocks.stages.capabilities import Capabilities, OneOf
from cudnn_blocks.stages.conv1d import portable_config
from cudnn_blocks.stages.kernel_stage import KernelChoice, KernelStage
from cudnn_blocks.stages.stage import REFERENCE
from cudnn_blocks.stages.toolchain import DslRequirement
from cudnn_blocks.target import GPU_TARGET_NAMES, Target

PORTABLE = "portable"
COMPACT, CHANNEL_LAST = "compact", "channel_last"
IDENTITY, SILU = "identity", "silu"
TRAP, REPORT = "trap", "report"

_SERVED = {
    "width": OneOf((2, 3, 4)),
    "spare_tokens": OneOf((0, 1)),
    "dtype": OneOf(("bf16", "fp16")),
}


@dataclass(frozen=True)
class CausalConv1dUpdateModes:
    """Compile-time facts beside the geometry."""

    dtype: str
    state_layout: str
    activation: str
    has_bias: bool
    has_indices: bool
    bad_index: str


class CausalConv1dUpdateStage(KernelStage):
    """One launch that advances the state and writes the output."""

    name = "conv1d_update"
    rows = (
        Capabilities(
            engine=PORTABLE,
            targets=OneOf(GPU_TARGET_NAMES),
            serves=_SERVED,
            dsl=DslRequirement((4, 8, 1)),
            evidence={"sm_90a": "benchmarks/results/nvidia-h200/causal_conv1d_update.json"},
        ),
        Capabilities(
            engine=REFERENCE,
            targets=OneOf(("cpu",)),
            serves=_SERVED,
            evidence={"cpu": "tests/unit/test_causal_conv1d_reference.py"},
        ),
    )

    def __init__(
        self,
        geometry: CausalConv1dGeometry,
        modes: CausalConv1dUpdateModes,
        target: Target,
        engine: str | None = None,
    ) -> None:
        facts = {
            "width": geometry.width,
            "spare_tokens": geometry.state_len - (geometry.width - 1),
            "dtype": modes.dtype,
        }
        super().__init__(facts, target, engine)
        self.geometry = geometry
        self.modes = modes

    def _choose_kernel(self) -> KernelChoice:
        config = portable_config.CausalConv1dUpdateConfig.from_geometry(
            self.geometry, self.target, **dataclasses.asdict(self.modes)
        )
        return KernelChoice(
            "cudnn_blocks.stages.conv1d.portable.CausalConv1dUpdateKernel",
            config,
            portable_config.smem_bytes(config),
        )

    def run_reference(self, operands: Sequence[torch.Tensor | None]) -> None:
        """Runs in torch."""
        reference.causal_conv1d_update(
            *operands,  # type: ignore[arg-type]
            use_silu=self.modes.activation == SILU,
        )

    def launch(self, operands: Sequence[torch.Tensor | None], stream: int) -> None:
        """One launch; the operands are in kernel order, and a decode step has no call to spare."""
        self._call(*operands, stream)  # type: ignore[misc]

    def describe(self) -> str:
        """Modes, and the tile of the kernel."""
        modes = self.modes
        parts = [
            modes.dtype,
            modes.activation,
            f"{modes.state_layout} state",
            "bias" if modes.has_bias else "no bias",
            f"indices ({modes.bad_index})" if modes.has_indices else "no indices",
        ]
        if self.engine == REFERENCE:
            parts.append("allocates")
        return ", ".join(parts)
