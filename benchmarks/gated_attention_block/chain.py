# SPDX-License-Identifier: Apache-2.0
"""The block as a torch user writes it: cuBLAS, functions for torch.compile, and some attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.gated_attention_block import data

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gated_attention_block.sampled import Tensors
    from cudnn_blocks import GatedAttentionGeometry

    Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``x w.T`` of ``[1, S, K]``; cuBLAS on a GPU."""
    return torch.mm(x[0], w.t()).unsqueeze(0)


def norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    w_q_norm: torch.Tensor,
    w_k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and rotation of ``[1, S, heads, D]`` in FP32, rounded once."""
    return _norm_rope(q, w_q_norm, cos, sin, eps), _norm_rope(k, w_k_norm, cos, sin, eps)


def _norm_rope(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    width = cos.shape[-1]
    rotated, rest = wide[..., :width], wide[..., width:]
    low, high = rotated.chunk(2, dim=-1)
    cos, sin = cos.float().unsqueeze(2), sin.float().unsqueeze(2)
    rotated = rotated * cos + torch.cat([-high, low], dim=-1) * sin
    return torch.cat([rotated, rest], dim=-1).to(x.dtype)


def gate(o: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """``o * sigmoid(gates)`` in FP32, rounded once, contiguous."""
    return (o.float() * torch.sigmoid(gates.float())).to(o.dtype)


@dataclass(frozen=True)
class Chain:
    """The five steps of the block."""

    geometry: GatedAttentionGeometry
    norm_rope: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """``norm_rope``, compiled or not."""
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """``gate``, compiled or not."""

    def before(self, buffers: Tensors) -> tuple[torch.Tensor, ...]:
        """Q, K, V and the gates."""
        slab = project(buffers["h"], buffers["w_qkvg"])
        found = data.bands(slab, self.geometry)
        small = (buffers[name] for name in data.SMALL)
        q, k = self.norm_rope(found["q"], found["k"], *small, self.geometry.qk_norm_eps)
        return q, k, found["v"], found["gate"]

    def run(self, buffers: Tensors, attend: Attend) -> Tensors:
        """The whole layer."""
        q, k, v, gates = self.before(buffers)
        o = self.gate(attend(q, k, v), gates)
        return {"out": project(o.flatten(2), buffers["w_o"])}
