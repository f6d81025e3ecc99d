# SPDX-License-Identifier: Apache-2.0
"""The stages of the gated attention block, and what each takes of a call and of the workspace."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks.blocks.gated_attention_factory import StageFactory
from cudnn_blocks.blocks.gated_attention_modes import Mode
from cudnn_blocks.blocks.gated_attention_operands import Presence
from cudnn_blocks.blocks.gated_attention_precision import Formats, Quant
from cudnn_blocks.blocks.gated_attention_regions import Regions
from cudnn_blocks.blocks.mx_sdpa_stage import MxSdpaStage
from cudnn_blocks.geometry import GatedAttentionGeometry
from cudnn_blocks.stages.attention.stage import SdpaStage
from cudnn_blocks.stages.cudnn_graph import CUDNN
from cudnn_blocks.stages.gemm.stage import GemmStage
from cudnn_blocks.stages.stage import Stage
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec
from cudnn_blocks.workspace import WorkspaceLayout


@dataclass(frozen=True)
class Wiring:
    """Which stages there are, and how operands and workspace reach them."""

    geometry: GatedAttentionGeometry
    formats: Formats
    presence: Presence
    mode: Mode
    quant: Quant | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.formats.activation

    @functools.cached_property
    def regions(self) -> Regions:
        """Of the workspace."""
        return Regions(self.geometry, self.dtype, self.mode, self.formats.w_o.block)

    def stages(
        self, samples: Mapping[str, TensorSpec], target: Target, engines: Mapping[str, str]
    ) -> tuple[Stage, ...]:
        """The stages, unchecked, for the samples' extents."""
        h = samples["h"]
        specs = {**samples, **self.regions.specs(h.shape[0], h.shape[1], h.device)}
        facts = (self.geometry, self.formats, self.presence, self.mode, self.quant)
        factory = StageFactory(*facts, specs, target)
        return tuple(factory.build(slot, engines.get(slot)) for slot in self.mode.slots)

    def needs_compact_rows(self, stages: Sequence[Stage]) -> bool:
        """True where the engine of a projection takes no pitch."""
        return any(isinstance(stage, GemmStage) and stage.engine == CUDNN for stage in stages)

    def check_extents(self, stages: Sequence[Stage], extents: Mapping[str, int]) -> None:
        """NotServedError where the engine of the attention serves the samples' extents alone."""
        for stage in stages:
            if isinstance(stage, SdpaStage | MxSdpaStage):
                stage.check_extents(extents["B"], extents["S"], extents["S"])

    def book(
        self, layout: WorkspaceLayout, stages: Sequence[Stage], batch: int, tokens: int
    ) -> None:
        """The regions at the samples' extents; engines share one scratch."""
        self.regions.book(layout, batch, tokens)
        scratch_bytes = 0
        for stage in stages:
            own = WorkspaceLayout()
            stage.book(own)
            scratch_bytes = max(scratch_bytes, own.size_bytes)
        if scratch_bytes:
            layout.book_scratch(scratch_bytes)

    def stage_operands(
        self,
        operands: Mapping[str, torch.Tensor | None],
        layout: WorkspaceLayout,
        workspace: torch.Tensor,
    ) -> list[list[Any]]:
        """The tensors of each stage in launch order, views of the workspace among them."""
        h = operands["h"]
        assert h is not None
        views = self.regions.views(layout, workspace, h.shape[0], h.shape[1])
        values = {**operands, **views}
        return [
            [None if name is None else values.get(name) for name in names]
            for names in self.mode.takes.values()
        ]
