# SPDX-License-Identifier: Apache-2.0
"""One layer of gated attention: sizes, operands, bytes, operations and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.gated_attention_block import data
from benchmarks.gated_attention_block.sampled import near
from benchmarks.gated_attention_block.sdpa_problem import attended_rows, attention_flops
from cudnn_blocks import SdpaGeometry
from cudnn_blocks.reference.gemm import gemm
from cudnn_blocks.reference.qk_norm_rope import norm_and_rotate
from cudnn_blocks.reference.sigmoid_gate import sigmoid_gate

if TYPE_CHECKING:
    import torch

    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.harness.arm import Arm
    from cudnn_blocks import GatedAttentionGeometry

LIMIT = 2e-2
"""Of a row's relative error: five roundings to BF16, one after the other."""


@dataclass(frozen=True)
class BlockProblem:
    """A prefill of one sequence."""

    model: str
    """Name of the geometry."""
    geometry: GatedAttentionGeometry
    tokens: int

    @property
    def name(self) -> str:
        """The middle word of a row."""
        return self.model

    @property
    def shape(self) -> str:
        """The last word of a row."""
        return f"S{self.tokens}"

    @property
    def traffic_bytes(self) -> int:
        """Hidden states in and out, weights and tables; what lies between is scratch."""
        one = self.geometry
        weights = one.d_model * (one.n_qkvg + one.attn_width)
        hidden = 2 * self.tokens * one.d_model
        return data.ELEMENT_BYTES * (weights + hidden + data.small_elements(one, self.tokens))

    @property
    def footprint_bytes(self) -> int:
        """Those, the slab and the attention output."""
        one = self.geometry
        scratch = self.tokens * (one.n_qkvg + one.attn_width)
        return self.traffic_bytes + data.ELEMENT_BYTES * scratch

    @property
    def flops(self) -> int:
        """Those of the three products and the two inside the attention."""
        one = self.geometry
        products = 2 * self.tokens * one.d_model * (one.n_qkvg + one.attn_width)
        return products + attention_flops(SdpaGeometry.of(one), self.tokens)

    def make_set(self, device: str) -> Tensors:
        """Random operands, the result poisoned."""
        one = self.geometry
        return {
            "h": data.normal(1, self.tokens, one.d_model, device=device),
            "w_qkvg": data.weight(one.n_qkvg, one.d_model, device),
            **data.small_operands(one, self.tokens, device),
            "w_o": data.weight(one.d_model, one.attn_width, device),
            "out": data.poisoned(1, self.tokens, one.d_model, device=device),
        }

    def fresh(self, buffers: Tensors) -> Tensors:
        """The same operands, the result poisoned."""
        shape = (1, self.tokens, self.geometry.d_model)
        return buffers | {"out": data.poisoned(*shape, device=str(buffers["h"].device))}

    def expected(self, buffers: Tensors, rows: torch.Tensor, variant: str) -> Tensors:
        """By the references of the stages: K and V of every token, the rest of some rows."""
        del variant
        one, (h, w) = self.geometry, (buffers["h"], buffers["w_qkvg"])
        widths = one.qkvg_block_widths
        own = h.new_empty(1, len(rows), sum(widths[:2]))
        shared = h.new_empty(1, self.tokens, sum(widths[2:]))
        gemm(h[:, rows], w[: own.shape[-1]], own)
        gemm(h, w[own.shape[-1] :], shared)
        q, gate = (x.unflatten(-1, (one.h_q, one.d_head)) for x in own.chunk(2, dim=-1))
        k, v = (x.unflatten(-1, (one.h_kv, one.d_head)) for x in shared.chunk(2, dim=-1))
        w_q, w_k, cos, sin = (buffers[name] for name in data.SMALL)
        q = norm_and_rotate(q, w_q, cos[:, rows], sin[:, rows], one.qk_norm_eps).to(data.DTYPE)
        k = norm_and_rotate(k, w_k, cos, sin, one.qk_norm_eps).to(data.DTYPE)
        o = attended_rows(q, k, v, rows, SdpaGeometry.of(one))
        sigmoid_gate(o, gate, o)
        out = h.new_empty(1, len(rows), one.d_model)
        gemm(o.flatten(2), buffers["w_o"], out)
        return {"out": out}

    def difference(self, actual: torch.Tensor, wanted: torch.Tensor, arm: Arm) -> str | None:
        """Relative to the size of each row."""
        del arm
        return near(actual, wanted, LIMIT)
