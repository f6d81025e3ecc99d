# SPDX-License-Identifier: Apache-2.0
"""The valid 3x3x3 convolution stage, post-operations included: engines, compile, launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks.geometry.conv3d import Conv3dGeometry, Shape
from cudnn_blocks.reference import conv3d as reference
from cudnn_blocks.stages.capabilities import Capabilities, Constraint, OneOf
from cudnn_blocks.stages.constraints import MultipleOf, NoneOr, UpTo
from cudnn_blocks.stages.conv3d import hopper_config, portable_config
from cudnn_blocks.stages.conv3d.epilogues import BIAS_RESIDUAL_PAD, NORM, NORM_PAD, RAW
from cudnn_blocks.stages.conv3d.hopper_tiles import (
    CHANNEL_TILES,
    IN_CHANNEL_MULTIPLE,
    NORM_OUT_CHANNELS,
)
from cudnn_blocks.stages.kernel_stage import KernelChoice, KernelStage
from cudnn_blocks.stages.stage import REFERENCE
from cudnn_blocks.stages.toolchain import DslRequirement
from cudnn_blocks.target import GPU_TARGET_NAMES, Target

__all__ = ["BIAS_RESIDUAL_PAD", "NORM", "NORM_PAD", "RAW", "Conv3dModes", "Conv3dStage"]

HOPPER, PORTABLE = "hopper", "portable"
DSL = DslRequirement((4, 8, 1))
EVIDENCE = {"sm_90a": "benchmarks/results/nvidia-h200/conv3d.json"}
"""Of every GPU engine of the family's convolutions."""

PORTABLE_CHANNEL_MULTIPLE = 8
PORTABLE_NORM_CHANNELS = 320
"""A CTA of the portable kernel holds a pixel's full channel row, so it can be no wider."""
MAX_PLANE_SITES = 2**31 - 1
MAX_ROWS = 2**28 - 1
"""Rows of the input over N, T and H: the portable kernel numbers eighths of rows in 32 bits.

The hopper kernel reaches further, and is held to the same so that a long clip and its chunks never
run on different engines.
"""

_SEPARATE_NORM = "Conv3dRaw, then RmsNormSiluPad"
_ANY_CHANNELS: Mapping[str, Constraint] = {
    "in_channels": MultipleOf(PORTABLE_CHANNEL_MULTIPLE),
    "out_channels": MultipleOf(PORTABLE_CHANNEL_MULTIPLE),
    "normalized_channels": NoneOr(
        MultipleOf(PORTABLE_CHANNEL_MULTIPLE, PORTABLE_NORM_CHANNELS), _SEPARATE_NORM
    ),
}


_KERNEL_OPERANDS = (
    ("input",),
    ("packed_weight",),
    ("bias",),
    ("gamma",),
    ("residual",),
    ("residual_bias",),
    ("output", "padded_output"),
    ("residual_output",),
    ("cache_output",),
)
"""The kernels' operands in order, by what the ops call them; None where an op has none."""


@dataclass(frozen=True)
class Conv3dModes:
    """Compile-time facts beside the geometry."""

    epilogue: str
    has_residual: bool = False
    has_residual_bias: bool = False
    history_frames: int = 0
    zero_leading_frames: int = 0

    @property
    def is_normalized(self) -> bool:
        """True where the norm over a pixel's channels is fused."""
        return self.epilogue in (NORM, NORM_PAD)


class Conv3dStage(KernelStage):
    """One launch: convolution, and what ``modes.epilogue`` adds.

    Args:
        geometry: channels.
        modes: compile-time facts.
        operand_names: what the stage is given, in order; names of the family's ops.
        input_shape: the largest ``[N, T, H, W, Ci]``; the tile is chosen for it.
        target: what to compile for.
        engine: pin.
    """

    name = "conv3d"
    rows = (
        Capabilities(
            engine=HOPPER,
            targets=OneOf(("sm_90a",)),
            serves={
                "in_channels": MultipleOf(IN_CHANNEL_MULTIPLE),
                "out_channels": OneOf(tuple(sorted(CHANNEL_TILES))),
                "normalized_channels": NoneOr(
                    OneOf(tuple(sorted(NORM_OUT_CHANNELS))), _SEPARATE_NORM
                ),
                "rows": UpTo(MAX_ROWS),
                "plane_sites": UpTo(MAX_PLANE_SITES),
            },
            dsl=DSL,
            evidence=EVIDENCE,
        ),
        Capabilities(
            engine=PORTABLE,
            targets=OneOf(GPU_TARGET_NAMES),
            serves={
                **_ANY_CHANNELS,
                "rows": UpTo(MAX_ROWS),
                "plane_sites": UpTo(MAX_PLANE_SITES),
            },
            dsl=DSL,
            evidence=EVIDENCE,
        ),
        Capabilities(
            engine=REFERENCE,
            targets=OneOf(("cpu",)),
            serves=_ANY_CHANNELS,
            evidence={"cpu": "tests/unit/test_conv3d_arithmetic.py"},
        ),
    )

    def __init__(
        self,
        geometry: Conv3dGeometry,
        modes: Conv3dModes,
        operand_names: tuple[str, ...],
        input_shape: Shape,
        target: Target,
        engine: str | None = None,
    ) -> None:
        n, t, h, w = input_shape[:4]
        out_channels = geometry.out_channels
        facts = {
            "in_channels": geometry.in_channels,
            "out_channels": out_channels,
            "normalized_channels": out_channels if modes.is_normalized else None,
            "rows": n * t * h,
            "plane_sites": h * w,
        }
        super().__init__(facts, target, engine)
        self.geometry = geometry
        self.modes = modes
        self._places = tuple(
            next((operand_names.index(name) for name in names if name in operand_names), None)
            for names in _KERNEL_OPERANDS
        )
        self.output_sites = (n, t - 2, h - 2, w - 2)

    def _choose_kernel(self) -> KernelChoice:
        configs: Any = {HOPPER: hopper_config, PORTABLE: portable_config}[self.engine]
        config = configs.Conv3dKernelConfig.from_geometry(
            self.geometry.in_channels,
            self.geometry.out_channels,
            self.target,
            **dataclasses.asdict(self.modes),
            output_sites=self.output_sites,
        )
        kernel = f"cudnn_blocks.stages.conv3d.{self.engine}.Conv3dKernel"
        return KernelChoice(kernel, config, configs.smem_bytes(config))

    def _kernel_operands(
        self, operands: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        return [None if place is None else operands[place] for place in self._places]

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        given: Sequence[Any] = self._kernel_operands(operands)
        x, weight, bias, gamma, residual, residual_bias, output, value, cache = given
        skip = (residual, residual_bias, value)
        modes = self.modes
        hint: dict[str, Any] = {"zero_leading_frames": modes.zero_leading_frames}
        if modes.epilogue == RAW:
            reference.conv3d_raw(x, weight, output, **hint)
        elif modes.epilogue == NORM:
            reference.conv3d_rmsnorm_silu(x, weight, bias, gamma, output, *skip, **hint)
        elif modes.epilogue == NORM_PAD:
            hint["history_frames"] = modes.history_frames
            reference.conv3d_rmsnorm_silu_pad(x, weight, bias, gamma, output, cache, *skip, **hint)
        else:
            reference.conv3d_bias_residual_pad(
                x, weight, bias, residual, output, residual_bias, **hint
            )

    def describe(self) -> str:
        """Channels, epilogue and knobs, and the tile of the kernel."""
        modes = self.modes
        parts = [
            f"{self.geometry.in_channels}->{self.geometry.out_channels}",
            modes.epilogue,
            *(["residual"] if modes.has_residual else []),
            *(["residual_bias"] if modes.has_residual_bias else []),
            *([f"history_frames={modes.history_frames}"] if modes.epilogue == NORM_PAD else []),
            f"zero_leading_frames={modes.zero_leading_frames}",
        ]
        return ", ".join([*parts, "allocates" if self.engine == REFERENCE else self._tile()])

    def _tile(self) -> str:
        config: Any = self._choose_kernel().config
        if self.engine == HOPPER:
            return str(config.tile)
        return f"{config.tile_w}x{config.tile_h} pixels x {config.tile_channels} channels"
