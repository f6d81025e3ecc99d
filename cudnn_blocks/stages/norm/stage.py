# SPDX-License-Identifier: Apache-2.0
"""The standalone normalisation, activation and padding stage: engines, compile, launch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cudnn_blocks.geometry.conv3d import RmsNormSiluGeometry, Shape
from cudnn_blocks.reference import conv3d_cache as reference
from cudnn_blocks.stages.capabilities import Capabilities, OneOf
from cudnn_blocks.stages.constraints import MultipleOf, UpTo
from cudnn_blocks.stages.kernel_stage import KernelChoice, KernelStage
from cudnn_blocks.stages.norm import portable_config
from cudnn_blocks.stages.stage import REFERENCE
from cudnn_blocks.stages.toolchain import DslRequirement
from cudnn_blocks.target import GPU_TARGET_NAMES, Target

PORTABLE = "portable"
CHANNEL_MULTIPLE = 8
MAX_CHANNELS = 2048
MAX_SITES = 2**31 - 2**16
"""Pixels of the padded output, which the kernel numbers in 32 bits."""

_CHANNELS = {"channels": MultipleOf(CHANNEL_MULTIPLE, MAX_CHANNELS)}


@dataclass(frozen=True)
class RmsNormSiluPadModes:
    """Compile-time facts beside the geometry."""

    has_input_bias: bool
    has_previous: bool
    has_residual: bool
    has_residual_bias: bool
    has_residual_output: bool
    history_frames: int


class RmsNormSiluPadStage(KernelStage):
    """One launch; operands in the order of the op.

    Args:
        geometry: channels.
        modes: compile-time facts.
        padded_shape: the largest shape of the padded output.
        target: what to compile for.
        engine: pin.
    """

    name = "rmsnorm_silu_pad"
    rows = (
        Capabilities(
            engine=PORTABLE,
            targets=OneOf(GPU_TARGET_NAMES),
            serves={**_CHANNELS, "padded_sites": UpTo(MAX_SITES)},
            dsl=DslRequirement((4, 8, 1)),
            evidence={"sm_90a": "benchmarks/results/nvidia-h200/rmsnorm_silu_pad.json"},
        ),
        Capabilities(
            engine=REFERENCE,
            targets=OneOf(("cpu",)),
            serves=_CHANNELS,
            evidence={"cpu": "tests/unit/test_conv3d_arithmetic.py"},
        ),
    )

    def __init__(
        self,
        geometry: RmsNormSiluGeometry,
        modes: RmsNormSiluPadModes,
        padded_shape: Shape,
        target: Target,
        engine: str | None = None,
    ) -> None:
        facts = {"channels": geometry.channels, "padded_sites": math.prod(padded_shape[:4])}
        super().__init__(facts, target, engine)
        self.geometry = geometry
        self.modes = modes

    def _choose_kernel(self) -> KernelChoice:
        config = portable_config.RmsNormSiluPadConfig.from_geometry(
            self.geometry.channels, self.target, **dataclasses.asdict(self.modes)
        )
        return KernelChoice(
            "cudnn_blocks.stages.norm.portable.RmsNormSiluPadKernel",
            config,
            portable_config.smem_bytes(config),
        )

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        reference.rmsnorm_silu_pad(*operands)

    def describe(self) -> str:
        """Channels and which optional operands take part."""
        given = [
            field.name.removeprefix("has_")
            for field in dataclasses.fields(self.modes)
            if field.name.startswith("has_") and getattr(self.modes, field.name)
        ]
        parts = [f"C={self.geometry.channels}", *given]
        return ", ".join([*parts, "allocates"] if self.engine == REFERENCE else parts)
