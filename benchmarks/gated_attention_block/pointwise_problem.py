# SPDX-License-Identifier: Apache-2.0
"""Norm with RoPE, and the gate, on the slab of a projection: sizes, operands, bytes, results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.gated_attention_block import data
from benchmarks.harness.checks import close
from cudnn_blocks.reference.qk_norm_rope import norm_and_rotate
from cudnn_blocks.reference.sigmoid_gate import sigmoid_gate

if TYPE_CHECKING:
    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.harness.arm import Arm
    from cudnn_blocks import GatedAttentionGeometry


@dataclass(frozen=True)
class _PointwiseProblem:
    model: str
    """Name of the geometry."""
    geometry: GatedAttentionGeometry
    tokens: int

    flops = None
    """Bytes bound it."""

    @property
    def shape(self) -> str:
        """The last word of a row."""
        return f"S{self.tokens}"

    def slab_set(self, device: str) -> Tensors:
        """A random slab and its bands."""
        return self.on_slab(data.normal(1, self.tokens, self.geometry.n_qkvg, device=device))

    def on_slab(self, slab: torch.Tensor) -> Tensors:
        """A slab and its bands."""
        return {"slab": slab, **data.bands(slab, self.geometry)}

    def difference(self, actual: torch.Tensor, wanted: torch.Tensor, arm: Arm) -> str | None:
        """Element by element."""
        return close(actual, wanted, data.tolerance_of(arm), "sampled rows")


@dataclass(frozen=True)
class NormRopeProblem(_PointwiseProblem):
    """Norm and rotation of Q and K: ours in place, the peer's into new tensors."""

    @property
    def name(self) -> str:
        """The middle words of a row."""
        return f"norm-rope/{self.model}"

    @property
    def traffic_bytes(self) -> int:
        """Q and K read and written, weights and tables read."""
        one = self.geometry
        heads = 2 * self.tokens * (one.h_q + one.h_kv) * one.d_head
        return data.ELEMENT_BYTES * (heads + data.small_elements(one, self.tokens))

    @property
    def footprint_bytes(self) -> int:
        """In place, Q and K count once."""
        one = self.geometry
        heads = self.tokens * (one.h_q + one.h_kv) * one.d_head
        return data.ELEMENT_BYTES * (heads + data.small_elements(one, self.tokens))

    def make_set(self, device: str) -> Tensors:
        """Random operands."""
        return self.slab_set(device) | data.small_operands(self.geometry, self.tokens, device)

    def fresh(self, buffers: Tensors) -> Tensors:
        """The same operands in a new slab."""
        return buffers | self.on_slab(buffers["slab"].clone())

    def expected(self, buffers: Tensors, rows: torch.Tensor, variant: str) -> Tensors:
        """By the reference."""
        del variant
        cos, sin = buffers["cos"][:, rows], buffers["sin"][:, rows]
        eps = self.geometry.qk_norm_eps
        return {
            name: norm_and_rotate(
                buffers[name][:, rows], buffers[f"w_{name}_norm"], cos, sin, eps
            ).to(data.DTYPE)
            for name in "qk"
        }


@dataclass(frozen=True)
class GateProblem(_PointwiseProblem):
    """The gate of an attention output, whose band lies in the slab."""

    @property
    def name(self) -> str:
        """The middle words of a row."""
        return f"gate/{self.model}"

    @property
    def traffic_bytes(self) -> int:
        """Output and gate read, the product written."""
        return data.ELEMENT_BYTES * 3 * self.tokens * self.geometry.attn_width

    footprint_bytes = traffic_bytes

    def make_set(self, device: str) -> Tensors:
        """Random operands, the result poisoned."""
        buffers = self.slab_set(device)
        shape = (1, self.tokens, self.geometry.h_q, self.geometry.d_head)
        return buffers | {
            "o": data.normal(*shape, device=device),
            "out": data.poisoned(*shape, device=device),
        }

    def fresh(self, buffers: Tensors) -> Tensors:
        """The same operands, the result poisoned."""
        return buffers | {"out": torch.full_like(buffers["o"], torch.nan)}

    def expected(self, buffers: Tensors, rows: torch.Tensor, variant: str) -> Tensors:
        """By the reference."""
        del variant
        o = buffers["o"][:, rows]
        out = torch.empty_like(o)
        sigmoid_gate(o, buffers["gate"][:, rows], out)
        return {"out": out}
