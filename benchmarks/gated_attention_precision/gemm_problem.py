# SPDX-License-Identifier: Apache-2.0
"""One projection of e4m3 codes: operands, the same in BF16, bytes and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from benchmarks.gated_attention_block import data
from benchmarks.gated_attention_block.gemm_problem import GemmProblem
from benchmarks.gated_attention_block.sampled import near
from benchmarks.gated_attention_precision.block_problem import weight_scale
from benchmarks.harness.arm import Role
from cudnn_blocks.quant_spec import E4M3

if TYPE_CHECKING:
    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.harness.arm import Arm

FAST, PROMOTED = "fast", "promoted"
"""Variants of equal terms: all of K in the tensor cores on both sides, or on neither."""
LIMIT = 1e-2
"""Of a row's relative error. One rounding to BF16 makes 2e-3; a sum on the border of two values
is 2**-7 of itself off in BF16, and an element may be five times the size of its row."""
FAST_LIMIT = 3e-2
"""With all of K in the tensor cores, whose sums keep some 14 bits."""


@dataclass(frozen=True)
class Fp8GemmProblem(GemmProblem):
    """``y = alpha * x w.T`` of codes, in BF16; the values of x are its codes."""

    @property
    def alpha(self) -> float:
        """The descale of w, a power of two: BF16 holds the values of the codes."""
        return 1 / weight_scale(self.k)

    @property
    def weight_bytes(self) -> int:
        """Those of the codes."""
        return self.n * self.k

    @property
    @override
    def traffic_bytes(self) -> int:
        """Every operand once."""
        m = self.tokens
        return m * self.k + self.weight_bytes + data.ELEMENT_BYTES * m * self.n

    @override
    def make_set(self, device: str) -> Tensors:
        """Random codes and their descales, the same values in BF16, the result poisoned."""
        buffers = super().make_set(device)
        for name, descale in (("x", 1.0), ("w", self.alpha)):
            codes = (buffers[name] / descale).to(E4M3)
            buffers[f"{name}8"] = codes
            buffers[name] = codes.to(data.DTYPE) * descale
            buffers[f"descale_{name}"] = torch.full((), descale, device=device)
        return buffers

    @override
    def difference(self, actual: torch.Tensor, wanted: torch.Tensor, arm: Arm) -> str | None:
        """Relative to the size of each row; peers are not held to the sums of ours."""
        is_accurate = arm.role is Role.OURS and arm.variant != FAST
        return near(actual, wanted, LIMIT if is_accurate else FAST_LIMIT)
