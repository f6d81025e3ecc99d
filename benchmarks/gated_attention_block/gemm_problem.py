# SPDX-License-Identifier: Apache-2.0
"""One projection: sizes, operands, bytes, operations and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.gated_attention_block import data
from benchmarks.harness.checks import close
from cudnn_blocks.reference import gemm as reference

if TYPE_CHECKING:
    import torch

    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.harness.arm import Arm
    from cudnn_blocks import GatedAttentionGeometry

NORM_ROPE = "norm-rope"
"""Variant with QK-norm and RoPE behind the product."""


@dataclass(frozen=True)
class GemmProblem:
    """``y = x w.T``, and with a geometry also the projection of a block with its epilogue."""

    n: int
    k: int
    tokens: int
    geometry: GatedAttentionGeometry | None = None
    """Of the block whose fused projection this is."""
    has_every_engine: bool = False
    """Time our other engines as well."""

    @property
    def name(self) -> str:
        """The middle word of a row: columns and depth."""
        return f"{self.n}x{self.k}"

    @property
    def shape(self) -> str:
        """The last word of a row."""
        return f"M{self.tokens}"

    @property
    def traffic_bytes(self) -> int:
        """Every operand of the plain product once."""
        m, n, k = self.tokens, self.n, self.k
        return data.ELEMENT_BYTES * (m * k + n * k + m * n)

    @property
    def footprint_bytes(self) -> int:
        """The same: no byte is there twice."""
        return self.traffic_bytes

    @property
    def flops(self) -> int:
        """Multiply-adds as two each."""
        return 2 * self.tokens * self.n * self.k

    def make_set(self, device: str) -> Tensors:
        """Random operands, the result poisoned."""
        buffers = {
            "x": data.normal(1, self.tokens, self.k, device=device),
            "w": data.weight(self.n, self.k, device),
            "y": data.poisoned(1, self.tokens, self.n, device=device),
        }
        if self.geometry is not None:
            buffers |= data.small_operands(self.geometry, self.tokens, device)
        return buffers

    def fresh(self, buffers: Tensors) -> Tensors:
        """The same operands, the result poisoned."""
        y = data.poisoned(1, self.tokens, self.n, device=str(buffers["y"].device))
        return buffers | {"y": y}

    def expected(self, buffers: Tensors, rows: torch.Tensor, variant: str) -> Tensors:
        """By the reference, from FP32 sums."""
        x, w = buffers["x"][:, rows], buffers["w"]
        y = x.new_empty(1, len(rows), self.n)
        geometry = self.geometry
        if variant != NORM_ROPE or geometry is None:
            reference.gemm(x, w, y)
            return {"y": y}
        w_q_norm, w_k_norm, cos, sin = (buffers[name] for name in data.SMALL)
        small = (w_q_norm, w_k_norm, cos[:, rows], sin[:, rows])
        reference.gemm_norm_rope(x, w, y, small, geometry.qk_norm_eps, geometry.qkvg_heads)
        return {"y": y}

    def difference(self, actual: torch.Tensor, wanted: torch.Tensor, arm: Arm) -> str | None:
        """Element by element."""
        return close(actual, wanted, data.tolerance_of(arm), "sampled rows")
