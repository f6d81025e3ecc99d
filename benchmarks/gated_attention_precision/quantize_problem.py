# SPDX-License-Identifier: Apache-2.0
"""Values of one attention operand that become codes: operands, bytes and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from benchmarks.gated_attention_block import data
from cudnn_blocks.ops.quantize_family import scales_bytes
from cudnn_blocks.quant_spec import BLOCK_FORMATS, E4M3, BlockFormat
from cudnn_blocks.reference import quantize as reference

if TYPE_CHECKING:
    from benchmarks.gated_attention_block.sampled import Tensors

SCALE = 64.0
"""Of the format without blocks; a power of two, exact in every type."""
POISON = 0x5A


@dataclass(frozen=True)
class QuantizeProblem:
    """BF16 to per-tensor e4m3 where ``fmt`` is no block format, else codes and their scales."""

    fmt: str
    tokens: int
    heads: int = 16
    d_head: int = 256
    along_tokens: bool = False
    """Blocks lie along the tokens, as those of V."""

    flops = None
    """Bytes bound it."""

    @property
    def name(self) -> str:
        """The middle word of a row."""
        return f"{self.fmt}-along-tokens" if self.along_tokens else self.fmt

    @property
    def shape(self) -> str:
        """The last word of a row."""
        return f"S{self.tokens}"

    @property
    def block(self) -> BlockFormat | None:
        """The block format, or None per tensor."""
        return BLOCK_FORMATS.get(self.fmt)

    @property
    def traffic_bytes(self) -> int:
        """Values read, codes and scales written."""
        written = sum(one.numel() for one in self.results("meta").values())
        return data.ELEMENT_BYTES * self.tokens * self.heads * self.d_head + written

    def results(self, device: str) -> Tensors:
        """Codes and scales, poisoned."""
        values, block = (1, self.tokens, self.heads, self.d_head), self.block

        def poisoned(*shape: int) -> torch.Tensor:
            return torch.full(shape, POISON, dtype=torch.uint8, device=device)

        if block is None:
            return {"codes": poisoned(*values).view(E4M3)}
        codes = poisoned(*values[:-1], self.d_head // block.codes_per_byte)
        return {"codes": codes, "scales": poisoned(scales_bytes(values, block, self.along_tokens))}

    def make_set(self, device: str) -> Tensors:
        """Random values, the results poisoned."""
        x = data.normal(1, self.tokens, self.heads, self.d_head, device=device)
        return {"x": x, **self.results(device)}

    def quantize(self, x: torch.Tensor, results: Tensors) -> None:
        """By the reference, into the results; no step brings anything from the host."""
        codes = results["codes"]
        if self.block is None:
            codes.view(torch.uint8).copy_(reference.encode_e4m3(x.float() * SCALE))
        else:
            scales, along = results["scales"], self.along_tokens
            reference.quantize_block(x, codes, scales, self.block, along_tokens=along)
