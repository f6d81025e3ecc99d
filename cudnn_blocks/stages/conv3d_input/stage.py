# SPDX-License-Identifier: Apache-2.0
"""The two stages of the streaming causal convolution 12 -> 160: packing, then the convolution.

Both take the operands of the op in its order, the scratch among them: ``input, packed_weight,
padded_input, cache_output, output, previous``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from cudnn_blocks.geometry.conv3d import (
    CAUSAL_OUT_CHANNELS,
    CAUSAL_PADDED_CHANNELS,
    MAX_HISTORY_FRAMES,
    Shape,
)
from cudnn_blocks.reference import conv3d_cache as reference
from cudnn_blocks.stages.capabilities import Capabilities, OneOf
from cudnn_blocks.stages.constraints import UpTo
from cudnn_blocks.stages.conv3d import portable_config
from cudnn_blocks.stages.conv3d.stage import DSL, EVIDENCE, HOPPER, PORTABLE, RAW
from cudnn_blocks.stages.conv3d_input import hopper_config, pack_portable_config
from cudnn_blocks.stages.kernel_stage import KernelChoice, KernelStage
from cudnn_blocks.stages.norm.stage import MAX_SITES
from cudnn_blocks.stages.stage import REFERENCE
from cudnn_blocks.target import GPU_TARGET_NAMES, Target
from cudnn_blocks.workspace import WorkspaceLayout

PADDED_INPUT = "padded_input"
TAPS16 = "taps16"
"""The portable convolution's name for 27 taps of 16 channels and a zero tap."""

_SIZES = {"padded_sites": UpTo(MAX_SITES)}
_ON_ANY_GPU = Capabilities(
    engine=PORTABLE,
    targets=OneOf(GPU_TARGET_NAMES),
    serves=_SIZES,
    dsl=DSL,
    evidence=EVIDENCE,
)
_ON_THE_CPU = Capabilities(
    engine=REFERENCE,
    targets=OneOf(("cpu",)),
    serves={},
    evidence={"cpu": "tests/unit/test_conv3d_streaming.py"},
)


class CausalPackStage(KernelStage):
    """Chunk and history into ``padded_input`` and the cache.

    Args:
        padded_shape: the largest shape of ``padded_input``.
        history_frames: frames of ``previous``, 0 without it.
        has_padded_input: False where the stage books ``padded_input`` in the workspace.
        target: what to compile for.
        engine: pin.
    """

    name = "causal_pack"
    rows = (_ON_ANY_GPU, _ON_THE_CPU)

    def __init__(
        self,
        padded_shape: Shape,
        history_frames: int,
        has_padded_input: bool,
        target: Target,
        engine: str | None = None,
    ) -> None:
        super().__init__({"padded_sites": math.prod(padded_shape[:4])}, target, engine)
        self._padded_shape = padded_shape
        self._history_frames = history_frames
        self._has_padded_input = has_padded_input

    def book(self, layout: WorkspaceLayout) -> None:
        """``padded_input``, where the caller brings none."""
        if not self._has_padded_input:
            layout.book(PADDED_INPUT, math.prod(self._padded_shape) * torch.bfloat16.itemsize)

    def _choose_kernel(self) -> KernelChoice:
        config = pack_portable_config.CausalPackConfig.from_geometry(
            self.target, history_frames=self._history_frames
        )
        return KernelChoice(
            "cudnn_blocks.stages.conv3d_input.pack_portable.CausalPackKernel",
            config,
            pack_portable_config.smem_bytes(config),
        )

    def _kernel_operands(
        self, operands: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        x, _, padded_input, cache_output, _, previous = operands
        return x, padded_input, cache_output, previous

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Nothing: the reference convolution packs as well."""

    def describe(self) -> str:
        """History, and who packs."""
        history = f"history_frames={self._history_frames}"
        return f"{history}, done by the convolution" if self.engine == REFERENCE else history


class CausalConv3dStage(KernelStage):
    """The convolution of ``padded_input``; planes that stand in for missing history are skipped.

    Args:
        padded_shape: the largest shape of ``padded_input``; the tile is chosen for it.
        history_frames: frames of ``previous``, 0 without it.
        target: what to compile for.
        engine: pin.
    """

    name = "causal_conv3d"
    rows = (
        Capabilities(
            engine=HOPPER,
            targets=OneOf(("sm_90a",)),
            serves=_SIZES,
            dsl=DSL,
            evidence=EVIDENCE,
        ),
        _ON_ANY_GPU,
        _ON_THE_CPU,
    )

    def __init__(
        self,
        padded_shape: Shape,
        history_frames: int,
        target: Target,
        engine: str | None = None,
    ) -> None:
        super().__init__({"padded_sites": math.prod(padded_shape[:4])}, target, engine)
        n, t, h, w, _ = padded_shape
        self._output_sites = (n, t - 2, h - 2, w - 2)
        self._zero_leading_frames = MAX_HISTORY_FRAMES - history_frames

    def _choose_kernel(self) -> KernelChoice:
        if self.engine == HOPPER:
            config = hopper_config.CausalConvConfig.from_geometry(
                self.target,
                zero_leading_frames=self._zero_leading_frames,
                output_sites=self._output_sites,
            )
            return KernelChoice(
                "cudnn_blocks.stages.conv3d_input.hopper.CausalConvKernel",
                config,
                hopper_config.smem_bytes(config),
            )
        generic = portable_config.Conv3dKernelConfig.from_geometry(
            CAUSAL_PADDED_CHANNELS,
            CAUSAL_OUT_CHANNELS,
            self.target,
            epilogue=RAW,
            has_residual=False,
            has_residual_bias=False,
            history_frames=0,
            zero_leading_frames=self._zero_leading_frames,
            output_sites=self._output_sites,
            weight_layout=TAPS16,
        )
        return KernelChoice(
            "cudnn_blocks.stages.conv3d.portable.Conv3dKernel",
            generic,
            portable_config.smem_bytes(generic),
        )

    def _kernel_operands(
        self, operands: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        _, packed_weight, padded_input, _, output, _ = operands
        if self.engine == HOPPER:
            return padded_input, packed_weight, output
        return padded_input, packed_weight, None, None, None, None, output, None, None

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Packs and convolves in torch."""
        reference.causal_conv3d_with_cache(*operands)

    def describe(self) -> str:
        """Planes skipped, and the tile of the kernel."""
        skipped = f"zero_leading_frames={self._zero_leading_frames}"
        if self.engine == REFERENCE:
            return f"12->160, {skipped}, allocates"
        config: Any = self._choose_kernel().config
        if self.engine == HOPPER:
            return f"12->160, {skipped}, {config.tile.width}x{config.tile.height} pixels"
        return f"12->160, {skipped}, {config.tile_w}x{config.tile_h} pixels"
