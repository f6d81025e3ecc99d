# SPDX-License-Identifier: Apache-2.0
"""What the GEMM kernels multiply and do with their accumulators, as compile-time facts."""

import math
from dataclasses import dataclass

E4M3 = "e4m3"
"""Operands that are codes: a sum times the factor alpha is the product, and y is BF16."""
D_HEADS = (64, 128, 256)
"""Heads that the norm + RoPE epilogue serves."""

PROMOTE_EVERY = 1
"""Stages of 128 codes whose sums the Hopper kernel keeps in the tensor cores; 0 for all of K."""


def element_bytes(dtype: str) -> int:
    """Bytes of an element of x and w."""
    return 1 if dtype == E4M3 else 2


@dataclass(frozen=True)
class NormRope:
    """QK-norm and RoPE of the slab ``Q | GATE | K | V``; the other two bands stay plain."""

    d_head: int
    h_q: int
    h_kv: int
    rope_dim: int
    """Leading channels of a head that rotate, even; channel i pairs with ``i + rope_dim / 2``."""
    has_norm: bool

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Heads of each band, in their order."""
        return (self.h_q, self.h_q, self.h_kv, self.h_kv)

    @property
    def first_k_head(self) -> int:
        """Heads of the bands Q and GATE, which come first."""
        return 2 * self.h_q

    @staticmethod
    def table_multiple(rope_dim: int) -> int:
        """Elements that the strides of cosines and sines are multiples of; compact ones are."""
        return max(2, math.gcd(8, rope_dim // 2))

    @property
    def half(self) -> int:
        """Distance of the two channels of a pair."""
        return self.rope_dim // 2

    def __str__(self) -> str:
        norm = "QK-norm" if self.has_norm else "no norm"
        return f"{norm} and RoPE of {self.rope_dim} of {self.d_head} channels in the epilogue"


class OperandTypes:
    """What follows from a config's ``dtype``, which is that of x and w."""

    dtype: str
    has_alpha: bool
    norm_rope: NormRope | None

    @property
    def has_codes(self) -> bool:
        """Q, K and V become codes, and GATE is a result of its own."""
        return self.is_fp8 and self.norm_rope is not None

    @property
    def is_scaled(self) -> bool:
        """A factor makes the sums of codes values; other products have one on request."""
        return self.is_fp8 or self.has_alpha

    @property
    def is_fp8(self) -> bool:
        """Whether x and w are codes."""
        return self.dtype == E4M3

    @property
    def output_dtype(self) -> str:
        """Of y."""
        return "bf16" if self.is_fp8 else self.dtype
