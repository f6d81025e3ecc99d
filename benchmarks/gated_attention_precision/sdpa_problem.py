# SPDX-License-Identifier: Apache-2.0
"""One attention of e4m3 codes: operands, bytes and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from benchmarks.gated_attention_block import data
from benchmarks.gated_attention_block.sampled import near
from benchmarks.gated_attention_block.sdpa_problem import SdpaProblem
from cudnn_blocks.quant_spec import E4M3

if TYPE_CHECKING:
    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.harness.arm import Arm

LIMIT = 6e-2
"""Of a head's relative error: weights of keys are rounded to e4m3, up to 1/16 of one of them."""
CODES = {"q": "q8", "k": "k8", "v": "v8"}


@dataclass(frozen=True)
class Fp8SdpaProblem(SdpaProblem):
    """Self-attention of codes whose descales are 1; the result is BF16."""

    @property
    @override
    def traffic_bytes(self) -> int:
        """Codes of Q, K and V once, and O."""
        q, kv = self.h_q * self.d_head, self.h_kv * self.d_head
        return self.tokens * (q + 2 * kv + data.ELEMENT_BYTES * q)

    @override
    def make_set(self, device: str) -> Tensors:
        """Random codes, the same values in BF16, the result poisoned."""
        buffers = super().make_set(device)
        del buffers["gate"]
        for name, codes in CODES.items():
            buffers[codes] = buffers[name].to(E4M3)
            buffers[name] = buffers[codes].to(data.DTYPE)
        return buffers

    @override
    def difference(self, actual: torch.Tensor, wanted: torch.Tensor, arm: Arm) -> str | None:
        """Relative to the size of each head's output."""
        del arm
        return near(actual, wanted, LIMIT)
