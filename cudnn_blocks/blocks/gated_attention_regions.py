# SPDX-License-Identifier: Apache-2.0
"""Regions of the block's workspace: what each holds, and the views that the stages take of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from cudnn_blocks.blocks.gated_attention_modes import O_REGION, PROJ_REGION, Mode
from cudnn_blocks.geometry import GatedAttentionGeometry, ProjBlock
from cudnn_blocks.quant_spec import E4M3, MX_BLOCK, BlockFormat
from cudnn_blocks.reference.scale_blobs import blob_bytes
from cudnn_blocks.tensor_spec import TensorSpec
from cudnn_blocks.workspace import ENGINE_SCRATCH, WorkspaceLayout

BLOB = torch.uint8
"""Of packed codes and of scale blobs."""


@dataclass(frozen=True)
class RegionTensor:
    """The one contiguous tensor that fills a region."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Without the padding to the next region."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Regions:
    """Every region of a mode, for any B and S."""

    geometry: GatedAttentionGeometry
    dtype: torch.dtype
    """Of activations."""
    mode: Mode
    o_format: BlockFormat | None = None
    """Of ``o4`` and ``sf_o``."""

    @functools.cached_property
    def tensors(self) -> Callable[[int, int], Mapping[str, RegionTensor]]:
        """Of B and S: what each region of the mode holds, in their order; the last are kept."""
        return functools.lru_cache(maxsize=64)(self._tensors)

    def _tensors(self, batch: int, tokens: int) -> Mapping[str, RegionTensor]:
        one = self.geometry

        def heads(count: int, dtype: torch.dtype) -> RegionTensor:
            return RegionTensor(dtype, (batch, tokens, count, one.d_head))

        def blob(blobs: int, rows: int, blocks: int) -> RegionTensor:
            return RegionTensor(BLOB, (blobs * blob_bytes(rows, blocks),))

        def row_scales(count: int) -> RegionTensor:
            return blob(batch * count, tokens, one.d_head // MX_BLOCK)

        every = {
            PROJ_REGION: RegionTensor(self.dtype, (batch, tokens, one.n_qkvg)),
            O_REGION: heads(one.h_q, self.dtype),
            "q8": heads(one.h_q, E4M3),
            "k8": heads(one.h_kv, E4M3),
            "v8": heads(one.h_kv, E4M3),
            "gate16": heads(one.h_q, self.dtype),
            "o8": heads(one.h_q, E4M3),
            "sf_q": row_scales(one.h_q),
            "sf_k": row_scales(one.h_kv),
            "sf_v": blob(batch * one.h_kv, one.d_head, -(-tokens // MX_BLOCK)),
        }
        if self.o_format is not None:
            packed = one.attn_width // self.o_format.codes_per_byte
            blocks = one.attn_width // self.o_format.block_size
            every["o4"] = RegionTensor(BLOB, (batch, tokens, packed))
            every["sf_o"] = blob(1, batch * tokens, blocks)
        return {name: every[name] for name in self.mode.regions}

    def book(self, layout: WorkspaceLayout, batch: int, tokens: int) -> None:
        """Every region, at the samples' extents."""
        for name, tensor in self.tensors(batch, tokens).items():
            layout.book(name, tensor.size_bytes)

    def views(
        self, layout: WorkspaceLayout, workspace: torch.Tensor, batch: int, tokens: int
    ) -> dict[str, torch.Tensor]:
        """What the stages take of the workspace: each region, bands of the slab, rows of O."""
        views = {
            name: layout.view(workspace, name, tensor.dtype, tensor.shape)
            for name, tensor in self.tensors(batch, tokens).items()
        }
        last = layout.regions[-1]
        if last.name == ENGINE_SCRATCH:
            views[last.name] = layout.view(workspace, last.name, BLOB, (last.size_bytes,))
        for name in ("o", "o8"):
            if name in views:
                views[f"{name}_rows"] = views[name].flatten(2)
        if PROJ_REGION in views:
            bands = views[PROJ_REGION].split(self.geometry.qkvg_block_widths, dim=-1)
            for band in ProjBlock:
                heads = (self.geometry.qkvg_heads[band], self.geometry.d_head)
                views[band.name.lower()] = bands[band].unflatten(-1, heads)
        return views

    def specs(self, batch: int, tokens: int, device: torch.device) -> Mapping[str, TensorSpec]:
        """Specs of the tensors with heads among the same views."""
        one = self.geometry
        tensors = self.tensors(batch, tokens)
        specs = {
            name: TensorSpec.contiguous(tensor.shape, tensor.dtype, device)
            for name, tensor in tensors.items()
        }
        if PROJ_REGION in tensors:
            stride = (tokens * one.n_qkvg, one.n_qkvg, one.d_head, 1)
            for band in ProjBlock:
                shape = (batch, tokens, one.qkvg_heads[band], one.d_head)
                specs[band.name.lower()] = TensorSpec(self.dtype, shape, stride, device)
        return specs
