# SPDX-License-Identifier: Apache-2.0
"""QuantizeFamilyOp: what the quantising and dequantising ops share, operands and sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from cudnn_blocks.api_base import Sample
from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.quantize import QuantizeGeometry
from cudnn_blocks.operands import Contiguous, Extents, Operand, Shape
from cudnn_blocks.ops.seen_calls import SeenCallsOp
from cudnn_blocks.quant_spec import BLOCK_FORMATS, E4M3, BlockFormat
from cudnn_blocks.reference.scale_blobs import blob_bytes
from cudnn_blocks.strided import VEC, Strided, vector_strides
from cudnn_blocks.target import Target

_PACKED = torch.uint8
_SCALE_BYTES = "bytes of scales"


class QuantizeFamilyOp(SeenCallsOp):
    """Values ``[B, S, H, D]``, or rows ``[R, D]``, and their codes.

    Args:
        samples: name to sample.
        block: the format, None for per-tensor e4m3.
        along_tokens: blocks of S.
        target: as APIBase has it.
        engines: as APIBase has it.
    """

    values_name: ClassVar[str]
    """The operand of 16-bit values."""

    def __init__(
        self,
        samples: Mapping[str, Sample | None],
        block: BlockFormat | None,
        along_tokens: bool,
        *,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(samples, None, target=target, engines=engines)
        self._block = block
        self._along_tokens = along_tokens

    def _plan(self) -> None:
        shape = self._specs[self.values_name].shape
        if len(shape) not in (2, 4):
            expected = "shape [R, D] or [B, S, H, D]"
            raise ContractError(self.values_name, expected, list(shape))
        if self._along_tokens and len(shape) == 2:
            raise ContractError("along_tokens", "False for [R, D]", True)
        block_channels = 1
        if self._block is not None and not self._along_tokens:
            block_channels = self._block.block_size
        heads = shape[2] if len(shape) == 4 else 1
        self.geometry = QuantizeGeometry(heads, shape[-1], block_channels)
        super()._plan()

    @property
    def _max_tokens(self) -> int:
        return self._limits["S" if "S" in self._limits else "R"]

    def _check_extents(self, extents: Extents) -> None:
        if self._block is None:
            return
        shape = tuple(extents.get(str(axis), axis) for axis in self._shape(self.geometry.d_head))
        expected = scales_bytes(shape, self._block, self._along_tokens)
        if extents[_SCALE_BYTES] != expected:
            raise ContractError("scales", f"shape [{expected}]", [extents[_SCALE_BYTES]])

    def _values(self, dtype: torch.dtype, *, is_mutated: bool = False) -> Operand:
        width = self.geometry.d_head
        strides = vector_strides(width, is_written=is_mutated)
        shape = self._shape(width)
        return Operand(self.values_name, dtype, shape, strides, is_mutated=is_mutated)

    def _codes(self, *, vector: int = VEC, is_mutated: bool = False) -> Operand:
        """Codes whose kernel moves this many at a time."""
        per_byte, dtype = 1, E4M3
        if self._block is not None:
            per_byte = self._block.codes_per_byte
            dtype = self._spelled("codes", self._block.code_dtype)
        width = self.geometry.d_head // per_byte
        # In bytes; codes of half a byte keep to the multiple of the values.
        strides = Strided(math.gcd(max(vector // per_byte, VEC), width), is_mutated)
        return Operand("codes", dtype, self._shape(width), strides, is_mutated=is_mutated)

    def _scales(self, *, is_mutated: bool = False) -> Operand:
        assert self._block is not None
        dtype = self._spelled("scales", self._block.scale_dtype)
        return Operand("scales", dtype, (_SCALE_BYTES,), Contiguous(), is_mutated=is_mutated)

    def _shape(self, width: int) -> Shape:
        if len(self._specs[self.values_name].shape) == 2:
            return ("R", width)
        return ("B", "S", self.geometry.heads, width)

    def _spelled(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """``dtype``, or uint8 where the sample is that."""
        return _PACKED if self._specs[name].dtype == _PACKED else dtype


def block_format(fmt: str) -> BlockFormat:
    """The format of a name; ContractError for any other."""
    found = BLOCK_FORMATS.get(fmt)
    if found is None:
        raise ContractError("fmt", f"one of {', '.join(BLOCK_FORMATS)}", repr(fmt))
    return found


def scales_bytes(shape: Sequence[Any], block: BlockFormat, along_tokens: bool) -> int:
    """Bytes of the scales of values ``[R, D]`` or ``[B, S, H, D]``, all blobs together."""
    batch, rows, heads, width = shape if len(shape) == 4 else (1, shape[0], 1, shape[-1])
    if along_tokens:
        rows, width = width, -(-rows // block.block_size) * block.block_size
    return int(batch * heads * blob_bytes(rows, width // block.block_size))
