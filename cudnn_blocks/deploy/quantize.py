# SPDX-License-Identifier: Apache-2.0
"""Requests for the quantisers, and for products of block-scaled weights."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from cudnn_blocks.api_base import APIBase
from cudnn_blocks.deploy.request import Batch, Dtype, Request, Tokens, spec
from cudnn_blocks.ops import DequantGemm, DequantizeBlock, QuantizeBlock, QuantizeFp8
from cudnn_blocks.ops.quantize_family import scales_bytes
from cudnn_blocks.quant_spec import BLOCK_FORMATS, E4M3, BlockFormat
from cudnn_blocks.reference.scale_blobs import blob_bytes
from cudnn_blocks.tensor_spec import TensorSpec

Format = Literal["mxfp8", "mxfp4", "nvfp4"]


class _Values(Request):
    """Values ``[B, S, H, D]``; rows ``[R, D]`` are R tokens of one head, by the same kernel."""

    batch: Batch = 1
    tokens: Tokens = 8192
    heads: Annotated[int, Field(description="heads; 1 for rows")] = 1
    d_head: Annotated[int, Field(description="channels of a head or of a row")]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        return (self.batch, self.tokens, self.heads, self.d_head)


class _Blocks(_Values):
    """Values in a block format."""

    fmt: Format
    along_tokens: Annotated[bool, Field(description="blocks of tokens, as V has them")] = False

    def samples(self, values: str) -> dict[str, TensorSpec]:
        """Values under their name, codes and scales."""
        block = BLOCK_FORMATS[self.fmt]
        size = scales_bytes(self.shape, block, self.along_tokens)
        return {
            f"sample_{values}": spec(torch.bfloat16, *self.shape),
            "sample_codes": _codes(block, *self.shape),
            "sample_scales": spec(block.scale_dtype, size),
        }

    @property
    def knobs(self) -> dict[str, Any]:
        """What both directions take."""
        return {"fmt": self.fmt, "along_tokens": self.along_tokens}


class QuantizeFp8Request(_Values):
    """Per-tensor e4m3 codes."""

    op_class: ClassVar[type[APIBase]] = QuantizeFp8
    op: Literal["quantize-fp8"]
    dtype: Dtype = "bf16"

    def arguments(self) -> dict[str, Any]:
        """See ``Request``; the scale is a kernel argument."""
        x, codes = spec(self.dtype, *self.shape), spec(E4M3, *self.shape)
        return {"sample_x": x, "sample_codes": codes, "scale": 1.0}


class QuantizeBlockRequest(_Blocks):
    """Codes and scales in a block format."""

    op_class: ClassVar[type[APIBase]] = QuantizeBlock
    op: Literal["quantize-block"]
    seq_lens: Annotated[bool, Field(description="a length per batch entry")] = False

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        lens = spec(torch.int32, self.batch) if self.seq_lens else None
        return {**self.samples("x"), **self.knobs, "sample_seq_lens": lens}


class DequantizeBlockRequest(_Blocks):
    """BF16 values of codes and scales."""

    op_class: ClassVar[type[APIBase]] = DequantizeBlock
    op: Literal["dequantize-block"]

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        return {**self.samples("y"), **self.knobs}


class DequantGemmRequest(Request):
    """A matrix product ``y = x w^T`` with block-scaled weights, and BF16 or block-scaled x."""

    op_class: ClassVar[type[APIBase]] = DequantGemm
    op: Literal["dequant-gemm"]
    batch: Batch = 1
    tokens: Tokens = 8192
    n: Annotated[int, Field(description="columns of y")]
    k: Annotated[int, Field(description="columns of x")]
    fmt: Annotated[Format, Field(description="of the weights")]
    x_fmt: Annotated[Format | None, Field(description="of x; none for BF16")] = None

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        w, x = BLOCK_FORMATS[self.fmt], None if self.x_fmt is None else BLOCK_FORMATS[self.x_fmt]
        rows = (self.batch, self.tokens)
        return {
            "sample_x": spec("bf16", *rows, self.k) if x is None else _codes(x, *rows, self.k),
            "sample_w": _codes(w, self.n, self.k),
            "sample_w_sf": _scales(w, self.n, self.k),
            "sample_y": spec("bf16", *rows, self.n),
            "sample_x_sf": None if x is None else _scales(x, self.batch * self.tokens, self.k),
            "w_format": self.fmt,
            "x_format": self.x_fmt,
        }


def _codes(block: BlockFormat, *shape: int) -> TensorSpec:
    *outer, width = shape
    dtype = block.code_dtype if block.codes_per_byte == 1 else torch.uint8
    return spec(dtype, *outer, width // block.codes_per_byte)


def _scales(block: BlockFormat, rows: int, width: int) -> TensorSpec:
    return spec(block.scale_dtype, blob_bytes(rows, width // block.block_size))
