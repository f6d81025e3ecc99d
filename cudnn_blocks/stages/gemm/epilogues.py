# SPDX-License-Identifier: Apache-2.0
"""What the GEMM kernels do with their accumulators, as compile-time facts."""

import math
from dataclasses import dataclass

D_HEADS = (64, 128, 256)
"""Heads that the norm + RoPE epilogue serves."""


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
