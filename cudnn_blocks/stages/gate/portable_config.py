# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the sigmoid gate kernel."""

from dataclasses import dataclass

VEC = 8  # channels of one 16-byte access
THREADS = 256
TOKENS = 2


@dataclass(frozen=True)
class SigmoidGateConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    dtype: str
    """``bf16`` or ``fp16``."""
    h_q: int
    d_head: int
    tokens: int
    """Neighbouring tokens of one thread."""
    threads: int
    use_pdl: bool

    @classmethod
    def from_geometry(cls, target, *, dtype, h_q, d_head) -> "SigmoidGateConfig":
        return cls(
            dtype=dtype,
            h_q=h_q,
            d_head=d_head,
            tokens=TOKENS,
            threads=THREADS,
            use_pdl=target.sm >= 90,
        )

    @property
    def head_vecs(self) -> int:
        """Vectors of a head."""
        return self.d_head // VEC

    @property
    def token_vecs(self) -> int:
        """Vectors of a token."""
        return self.h_q * self.head_vecs


def smem_bytes(config: SigmoidGateConfig) -> int:
    """Shared memory of one CTA: none."""
    return 0
