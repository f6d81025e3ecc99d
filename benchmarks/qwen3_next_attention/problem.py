# SPDX-License-Identifier: Apache-2.0
"""A prefill of one layer of Qwen3-Next-80B-A3B: the module, its inputs and its exact result."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gated_attention_block.block_problem import BlockProblem
from benchmarks.gated_attention_block.cases import GEOMETRIES, QWEN3_NEXT
from cudnn_blocks import GatedAttentionGeometry

Buffers = dict[str, Any]
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class LayerProblem:
    """A prompt without a cache, batch 1, BF16, seeded random weights."""

    tokens: int
    geometry: GatedAttentionGeometry = field(default=GEOMETRIES[QWEN3_NEXT])

    name = QWEN3_NEXT

    @property
    def shape(self) -> str:
        """The last word of a row."""
        return f"S{self.tokens}"

    @property
    def traffic_bytes(self) -> int:
        """Those of the block."""
        return BlockProblem(self.name, self.geometry, self.tokens).traffic_bytes

    @property
    def flops(self) -> int:
        """Those of the block."""
        return BlockProblem(self.name, self.geometry, self.tokens).flops

    def make_set(self, device: str) -> Buffers:
        """The layer in evaluation mode, hidden states, and the model's own RoPE tables."""
        from transformers.models.qwen3_next import modeling_qwen3_next as modeling

        one = self.geometry
        config = modeling.Qwen3NextConfig(
            hidden_size=one.d_model,
            num_attention_heads=one.h_q,
            num_key_value_heads=one.h_kv,
            head_dim=one.d_head,
            rms_norm_eps=one.qk_norm_eps,
        )
        config._attn_implementation = "sdpa"
        with torch.device(device):
            layer = modeling.Qwen3NextAttention(config, layer_idx=0).eval().to(DTYPE)
            for parameter in layer.parameters():
                spread = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.1
                parameter.requires_grad_(False).normal_(std=spread)
            h = torch.randn(1, self.tokens, one.d_model, dtype=DTYPE)
            rotary = modeling.Qwen3NextRotaryEmbedding(config)
            tables = rotary(h, torch.arange(self.tokens)[None])
        return {"layer": layer, "h": h, "tables": tables}

    def expected(self, buffers: Buffers) -> torch.Tensor:
        """By the layer itself in FP32."""
        layer = copy.deepcopy(buffers["layer"]).float()
        tables = [table.float() for table in buffers["tables"]]
        return layer(buffers["h"].float(), tables, None)[0]
