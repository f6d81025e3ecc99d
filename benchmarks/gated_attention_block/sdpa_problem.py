# SPDX-License-Identifier: Apache-2.0
"""One attention, plain or gated: sizes, operands, bytes, operations and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.gated_attention_block import data
from benchmarks.gated_attention_block.sampled import near
from cudnn_blocks import SdpaGeometry
from cudnn_blocks.reference.attention import AttentionMask, sdpa
from cudnn_blocks.reference.sigmoid_gate import sigmoid_gate

if TYPE_CHECKING:
    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.harness.arm import Arm

GATE = "gate"
"""Variant with the gate in the epilogue."""
LIMIT = 1e-2
"""Of a head's relative error: weights and outputs are rounded to BF16, which makes 3e-3."""


def attended_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, geometry: SdpaGeometry
) -> torch.Tensor:
    """Output of some query rows by the reference, each over the keys that it sees.

    Args:
        q: ``[1, len(rows), h_q, D]``, those rows alone.
        k: ``[1, S, h_kv, D]``.
        v: shape of k.
        rows: their numbers.
        geometry: heads, scale, and whether the mask is causal.
    """
    o = torch.empty_like(q)
    everything = AttentionMask(is_causal=False)
    for i, row in enumerate(rows.tolist()):
        keys = slice(0, row + 1 if geometry.is_causal else None)
        one, operands = slice(i, i + 1), (k[:, keys], v[:, keys])
        sdpa(q[:, one], *operands, o[:, one], None, None, None, geometry.scale, everything)
    return o


def attention_flops(geometry: SdpaGeometry, tokens: int) -> int:
    """Multiply-adds of both products as two each, those on masked scores left out."""
    scores = tokens * (tokens + 1) // 2 if geometry.is_causal else tokens * tokens
    return 4 * geometry.h_q * geometry.d_head * scores


@dataclass(frozen=True)
class SdpaProblem:
    """Self-attention of contiguous operands."""

    h_q: int
    h_kv: int
    d_head: int
    is_causal: bool
    tokens: int
    has_every_engine: bool = False
    """Time our other engines as well."""

    @property
    def geometry(self) -> SdpaGeometry:
        """Heads, scale and mask."""
        return SdpaGeometry(self.h_q, self.h_kv, self.d_head, is_causal=self.is_causal)

    @property
    def name(self) -> str:
        """The middle word of a row: channels of a head, and mask."""
        return f"d{self.d_head}-{'causal' if self.is_causal else 'full'}"

    @property
    def shape(self) -> str:
        """The last word of a row."""
        return f"S{self.tokens}"

    @property
    def traffic_bytes(self) -> int:
        """Q, K, V and O once; the gate is an extra of its variant."""
        return data.ELEMENT_BYTES * 2 * self.tokens * (self.h_q + self.h_kv) * self.d_head

    @property
    def footprint_bytes(self) -> int:
        """The same: no byte is there twice."""
        return self.traffic_bytes

    @property
    def flops(self) -> int:
        """Those of the mask alone."""
        return attention_flops(self.geometry, self.tokens)

    def make_set(self, device: str) -> Tensors:
        """Random operands, the result poisoned."""
        heads = {"q": self.h_q, "k": self.h_kv, "v": self.h_kv, "gate": self.h_q}
        buffers = {
            name: data.normal(1, self.tokens, count, self.d_head, device=device)
            for name, count in heads.items()
        }
        return buffers | {"o": torch.full_like(buffers["q"], torch.nan)}

    def fresh(self, buffers: Tensors) -> Tensors:
        """The same operands, the result poisoned."""
        return buffers | {"o": torch.full_like(buffers["q"], torch.nan)}

    def expected(self, buffers: Tensors, rows: torch.Tensor, variant: str) -> Tensors:
        """By the reference, row by row."""
        q, k, v = (buffers[name] for name in "qkv")
        o = attended_rows(q[:, rows], k, v, rows, self.geometry)
        if variant == GATE:
            sigmoid_gate(o, buffers["gate"][:, rows], o)
        return {"o": o}

    def difference(self, actual: torch.Tensor, wanted: torch.Tensor, arm: Arm) -> str | None:
        """Relative to the size of each head's output."""
        del arm
        return near(actual, wanted, LIMIT)
