# SPDX-License-Identifier: Apache-2.0
"""The stages of the gated attention block, and what each takes of a call and of the workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks.blocks.gated_attention_operands import Presence
from cudnn_blocks.geometry import GatedAttentionGeometry, ProjBlock
from cudnn_blocks.operands import ACTIVATION_DTYPES
from cudnn_blocks.stages.attention.stage import SdpaModes, SdpaStage
from cudnn_blocks.stages.cudnn_graph import CUDNN
from cudnn_blocks.stages.gate.stage import SigmoidGateModes, SigmoidGateStage
from cudnn_blocks.stages.gemm.epilogues import NormRope
from cudnn_blocks.stages.gemm.stage import GemmModes, GemmStage
from cudnn_blocks.stages.qk_norm_rope.stage import QkNormRopeModes, QkNormRopeStage
from cudnn_blocks.stages.stage import Stage
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec
from cudnn_blocks.workspace import WorkspaceLayout

PROJ_REGION, O_REGION = "proj", "o"
PROJ, PROJ_NORM_ROPE = "qkv_gate_proj", "qkv_gate_proj_norm_rope"
NORM_ROPE, SDPA, GATE, OUT_PROJ = "qk_norm_rope", "sdpa", "sigmoid_gate", "out_proj"
SLOTS = {
    (False, False): (PROJ, NORM_ROPE, SDPA, GATE, OUT_PROJ),
    (True, False): (PROJ_NORM_ROPE, SDPA, GATE, OUT_PROJ),
    (False, True): (PROJ, NORM_ROPE, SDPA, OUT_PROJ),
    (True, True): (PROJ_NORM_ROPE, SDPA, OUT_PROJ),
}
"""``(fuse_norm_rope, fuse_gate)`` to the stages in launch order."""
_TAKES: Mapping[str, tuple[str | None, ...]] = {
    PROJ: ("h", "w_qkvg", "proj"),
    PROJ_NORM_ROPE: ("h", "w_qkvg", "proj", "w_q_norm", "w_k_norm", "cos", "sin"),
    NORM_ROPE: ("q", "k", "w_q_norm", "w_k_norm", "cos", "sin"),
    SDPA: ("q", "k", "v", "o", "gate", "lse", "seq_lens"),
    GATE: ("o", "gate", "o"),
    OUT_PROJ: ("o_rows", "w_o", "out"),
}
"""Operands of each stage, by name."""


@dataclass(frozen=True)
class Wiring:
    """Which stages there are, and how operands and workspace reach them."""

    geometry: GatedAttentionGeometry
    dtype: torch.dtype
    presence: Presence
    fuse_norm_rope: bool
    fuse_gate: bool

    @property
    def slots(self) -> tuple[str, ...]:
        """Stage names in launch order."""
        return SLOTS[self.fuse_norm_rope, self.fuse_gate]

    def stages(
        self, samples: Mapping[str, TensorSpec], target: Target, engines: Mapping[str, str]
    ) -> tuple[Stage, ...]:
        """The stages, unchecked, for the samples' extents."""
        specs = {**samples, **self._workspace_specs(samples["h"])}
        return tuple(self._stage(slot, specs, target, engines.get(slot)) for slot in self.slots)

    def needs_compact_rows(self, stages: Sequence[Stage]) -> bool:
        """True where the engine of a projection takes no pitch."""
        return any(isinstance(stage, GemmStage) and stage.engine == CUDNN for stage in stages)

    def check_extents(self, stages: Sequence[Stage], extents: Mapping[str, int]) -> None:
        """NotServedError where the engine of the attention serves the samples' extents alone."""
        for stage in stages:
            if isinstance(stage, SdpaStage):
                stage.check_extents(extents["B"], extents["S"], extents["S"])

    def book(self, layout: WorkspaceLayout, stages: Sequence[Stage], rows: int) -> None:
        """The regions for ``rows`` tokens over all entries; engines share one scratch."""
        row_bytes = rows * self.dtype.itemsize
        layout.book(PROJ_REGION, row_bytes * self.geometry.n_qkvg)
        layout.book(O_REGION, row_bytes * self.geometry.attn_width)
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
        views = self._views(layout, workspace, h.shape[0], h.shape[1])
        values = {**operands, **views}
        every = []
        for slot in self.slots:
            names = _TAKES[slot]
            if slot == SDPA and not self.fuse_gate:
                names = tuple(None if name == "gate" else name for name in names)
            every.append([None if name is None else values[name] for name in names])
        return every

    def _views(
        self, layout: WorkspaceLayout, workspace: torch.Tensor, batch: int, tokens: int
    ) -> dict[str, torch.Tensor]:
        one = self.geometry
        proj = layout.view(workspace, PROJ_REGION, self.dtype, (batch, tokens, one.n_qkvg))
        o_rows = layout.view(workspace, O_REGION, self.dtype, (batch, tokens, one.attn_width))
        bands = proj.split(one.qkvg_block_widths, dim=-1)
        views = {"proj": proj, "o_rows": o_rows, "o": o_rows.unflatten(-1, (one.h_q, one.d_head))}
        for band in ProjBlock:
            heads = (one.qkvg_heads[band], one.d_head)
            views[band.name.lower()] = bands[band].unflatten(-1, heads)
        return views

    def _workspace_specs(self, h: TensorSpec) -> dict[str, TensorSpec]:
        """Specs of the same views for the samples' extents."""
        one, (batch, tokens, _) = self.geometry, h.shape
        width = one.n_qkvg
        specs = {
            name: TensorSpec.contiguous((batch, tokens, *inner), self.dtype, h.device)
            for name, inner in (
                ("proj", (width,)),
                ("o_rows", (one.attn_width,)),
                ("o", (one.h_q, one.d_head)),
            )
        }
        for band in ProjBlock:
            shape = (batch, tokens, one.qkvg_heads[band], one.d_head)
            stride = (tokens * width, width, one.d_head, 1)
            specs[band.name.lower()] = TensorSpec(self.dtype, shape, stride, h.device)
        return specs

    def _stage(
        self, slot: str, specs: Mapping[str, TensorSpec], target: Target, engine: str | None
    ) -> Stage:
        one, dtype = self.geometry, ACTIVATION_DTYPES[self.dtype]
        tokens = specs["h"].shape[1]
        if slot == NORM_ROPE:
            sizes = (one.h_q, one.h_kv, one.d_head, one.rope_dim)
            norm_rope = QkNormRopeModes(dtype, *sizes, has_norm=one.qk_norm)
            return QkNormRopeStage(norm_rope, one.qk_norm_eps, tokens, target, engine)
        if slot == SDPA:
            modes = SdpaModes.of(
                one,
                dtype,
                has_gate=self.fuse_gate,
                has_lse=self.presence.has_lse,
                has_seq_lens=self.presence.has_seq_lens,
            )
            samples = [specs[name] for name in ("q", "k", "v", "o")]
            return SdpaStage(modes, one.scale, samples, target, engine)
        if slot == GATE:
            gate = SigmoidGateModes(dtype, one.h_q, one.d_head)
            return SigmoidGateStage(gate, tokens, target, engine)
        return self._gemm(slot, specs["h"], target, engine)

    def _gemm(self, slot: str, h: TensorSpec, target: Target, engine: str | None) -> GemmStage:
        one, rows = self.geometry, h.shape[0] * h.shape[1]
        n, k = (one.d_model, one.attn_width) if slot == OUT_PROJ else (one.n_qkvg, one.d_model)
        norm_rope = None
        if slot == PROJ_NORM_ROPE:
            norm_rope = NormRope(one.d_head, one.h_q, one.h_kv, one.rope_dim, one.qk_norm)
        modes = GemmModes(n, k, ACTIVATION_DTYPES[self.dtype], norm_rope)
        return GemmStage(slot, modes, rows, target, engine, eps=one.qk_norm_eps, device=h.device)
