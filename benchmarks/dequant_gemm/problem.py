# SPDX-License-Identifier: Apache-2.0
"""One product with coded weights: sizes, operands, bytes, operations and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks.quant_spec import BLOCK_FORMATS, E8M0, BlockFormat
from cudnn_blocks.reference.dequant_gemm import dequant_gemm
from cudnn_blocks.reference.gated_attention_precision import values_of
from cudnn_blocks.reference.scale_blobs import blob_bytes

Tensors = dict[str, torch.Tensor]
VALUES = torch.bfloat16
SCALES = {True: (120, 124), False: (0x08, 0x18)}
"""Codes of scales around 1/32, of E8M0 (True) and of e4m3."""


@dataclass(frozen=True)
class DequantGemmProblem:
    """``y = x @ W.T``, W of block-scaled codes."""

    fmt: str
    n: int
    k: int
    rows: int

    results = ("y",)

    @property
    def name(self) -> str:
        """The middle word of a row: format, columns and depth."""
        return f"{self.fmt}-{self.n}x{self.k}"

    @property
    def shape(self) -> str:
        """The last word of a row."""
        return f"M{self.rows}"

    @property
    def block(self) -> BlockFormat:
        """The weights' format."""
        return BLOCK_FORMATS[self.fmt]

    @property
    def weight_bytes(self) -> int:
        """Codes and scales."""
        block = self.block
        blob = blob_bytes(self.n, self.k // block.block_size)
        return self.n * self.k // block.codes_per_byte + blob

    @property
    def value_bytes(self) -> int:
        """The weights in BF16."""
        return VALUES.itemsize * self.n * self.k

    @property
    def traffic_bytes(self) -> int:
        """Every operand once."""
        return self.weight_bytes + VALUES.itemsize * self.rows * (self.n + self.k)

    @property
    def flops(self) -> int:
        """Multiply-adds as two each."""
        return 2 * self.rows * self.n * self.k

    def make_set(self, device: str) -> Tensors:
        """Random operands, the same weights in BF16 for the peers, the result poisoned."""
        n, k, block, byte = self.n, self.k, self.block, torch.uint8
        sizes: dict[str, Any] = {"dtype": byte, "device": device}
        w = torch.randint(0, 256, (n, k // block.codes_per_byte), **sizes)
        if block.codes_per_byte == 1:
            w &= 0xBF  # finite codes, of at most 2
        low, high = SCALES[block.scale_dtype == E8M0]
        w_sf = torch.randint(low, high, (blob_bytes(n, k // block.block_size),), **sizes)
        values = torch.empty(n, k, dtype=VALUES, device=device)
        if device != "meta":
            values.copy_(values_of(w, w_sf, block))
        return {
            "x": torch.randn(1, self.rows, k, dtype=VALUES, device=device),
            "w": w,
            "w_sf": w_sf,
            "values": values,
            "y": torch.full((1, self.rows, n), torch.nan, dtype=VALUES, device=device),
        }

    def expected(self, buffers: Tensors) -> Tensors:
        """By the reference."""
        x, w, w_sf, y = (buffers[name] for name in ("x", "w", "w_sf", "y"))
        done = torch.empty_like(y)
        dequant_gemm(x, None, w, w_sf, done, 1.0, None, self.block)
        return {"y": done}

    def unfused(self, buffers: Tensors) -> Tensors:
        """By torch, on the weights' values."""
        return {"y": buffers["x"] @ buffers["values"].t()}
