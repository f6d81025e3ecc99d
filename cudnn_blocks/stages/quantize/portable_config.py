# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the quantising and dequantising kernels."""

from dataclasses import dataclass

from cudnn_blocks.quant_spec import BLOCK_FORMATS, E4M3, BlockFormat

FP8 = "fp8"
"""Per-tensor e4m3, beside the names of the block formats."""
VEC = 8  # elements of one 16-byte access of 16-bit values
THREADS = 256
TOKENS = 4
BLOB_TILE_ROWS, BLOB_TILE_SCALES = 128, 4
CVT_E4M3_SM = 89  # conversions of e4m3 in hardware
DEQUANTIZE_VEC = 16  # codes of one thread and token
DEQUANTIZE_TOKENS = 2


class _Format:
    """What follows from the name of a format."""

    fmt: str

    @property
    def block(self) -> BlockFormat | None:
        """The block format, or None per tensor."""
        return BLOCK_FORMATS.get(self.fmt)

    @property
    def is_e4m3(self) -> bool:
        """Codes of 8 bits."""
        return self.block is None or self.block.code_dtype == E4M3

    @property
    def codes_per_byte(self) -> int:
        """1 for e4m3, 2 for e2m1."""
        return 1 if self.is_e4m3 else 2


@dataclass(frozen=True)
class QuantizeConfig(_Format):
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    fmt: str
    """``fp8``, or the name of a block format."""
    dtype: str
    """``bf16`` or ``fp16``, of the values."""
    heads: int
    d_head: int
    along_tokens: bool
    """Blocks of tokens instead of channels."""
    has_seq_lens: bool
    tokens: int
    """Neighbouring tokens of one thread."""
    threads: int
    has_cvt: bool
    """e4m3 conversions in hardware; else in integer arithmetic, with the same bits."""
    use_pdl: bool

    @classmethod
    def from_geometry(
        cls, target, *, fmt, dtype, heads, d_head, along_tokens, has_seq_lens
    ) -> "QuantizeConfig":
        return cls(
            fmt=fmt,
            dtype=dtype,
            heads=heads,
            d_head=d_head,
            along_tokens=along_tokens,
            has_seq_lens=has_seq_lens,
            tokens=VEC if along_tokens else TOKENS,
            threads=THREADS,
            has_cvt=target.sm >= CVT_E4M3_SM,
            use_pdl=target.sm >= 90,
        )

    @property
    def block_lanes(self) -> int:
        """Neighbouring lanes that share a scale; 1 per tensor."""
        return 1 if self.block is None else self.block.block_size // VEC

    @property
    def head_vecs(self) -> int:
        """Vectors of a head, and of what pads its scales."""
        if self.block is None:
            return self.d_head // VEC
        channels = BLOB_TILE_ROWS
        if not self.along_tokens:
            channels = BLOB_TILE_SCALES * self.block.block_size
        return -(-self.d_head // channels) * channels // VEC

    @property
    def token_vecs(self) -> int:
        """Vectors of a token."""
        return self.heads * self.head_vecs

    def batch_vecs(self, tokens: int) -> int:
        """Vectors of one batch, padding included."""
        rows = tokens
        if self.block is not None:
            multiple = BLOB_TILE_ROWS
            if self.along_tokens:
                multiple = BLOB_TILE_SCALES * self.block.block_size
            rows = -(-tokens // multiple) * multiple
        return rows * self.token_vecs

    @property
    def is_padded(self) -> bool:
        """Some threads hold no channels, only padding of the scales."""
        return self.head_vecs * VEC != self.d_head


@dataclass(frozen=True)
class DequantizeConfig(_Format):
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    fmt: str
    """``fp8``, or the name of a block format."""
    heads: int
    d_head: int
    along_tokens: bool
    """Blocks of tokens instead of channels."""
    tokens: int
    """Neighbouring tokens of one thread; they share a block where blocks lie along tokens."""
    threads: int
    has_cvt: bool
    """e4m3 conversions in hardware; else in integer arithmetic, with the same bits."""
    use_pdl: bool

    @classmethod
    def from_geometry(cls, target, *, fmt, heads, d_head, along_tokens) -> "DequantizeConfig":
        return cls(
            fmt=fmt,
            heads=heads,
            d_head=d_head,
            along_tokens=along_tokens,
            tokens=VEC if along_tokens else DEQUANTIZE_TOKENS,
            threads=THREADS,
            has_cvt=target.sm >= CVT_E4M3_SM,
            use_pdl=target.sm >= 90,
        )

    @property
    def code_words(self) -> int:
        """32-bit words of the codes of one thread and token."""
        return DEQUANTIZE_VEC // (4 * self.codes_per_byte)

    @property
    def head_vecs(self) -> int:
        """Threads of a head."""
        return self.d_head // DEQUANTIZE_VEC

    @property
    def token_vecs(self) -> int:
        """Threads of a token."""
        return self.heads * self.head_vecs

    def batch_vecs(self, tokens: int) -> int:
        """Threads' vectors of one batch."""
        return tokens * self.token_vecs


def smem_bytes(config: QuantizeConfig | DequantizeConfig) -> int:
    """Shared memory of one CTA: none."""
    return 0
