# SPDX-License-Identifier: Apache-2.0
"""What both products of a few activations with block-scaled weights take."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Uint8
from cutlass.cute.runtime import make_fake_tensor

VEC = 8  # BF16 elements of a 16-byte vector
WORDS = 4  # 32-bit words of a vector


@dataclass(frozen=True)
class Operands:
    """Everything in global memory."""

    mX: cute.Tensor
    """(M, K)"""
    mW: cute.Tensor
    """(N, BYTES): codes."""
    mSF: cute.Tensor
    """Bytes of the scale blob."""
    mY: cute.Tensor
    """(M, N)"""
    alpha: Float32


def words_view(sX: cute.Tensor, offset) -> cute.Tensor:
    """A vector of 4 words from an offset on."""
    iterator = sX.iterator + cute.assume(offset, divby=WORDS)
    return cute.make_tensor(iterator, cute.make_layout(WORDS))


def fake_operands(_config: object) -> tuple:
    """Fake tensors in ``__call__`` order, without the stream; every extent is dynamic."""
    b, s, n = cute.sym_int(), cute.sym_int(), cute.sym_int(divisibility=VEC)
    k = cute.sym_int(divisibility=32)

    def fake(dtype, *shape, multiple=VEC):
        stride = (*(cute.sym_int64(divisibility=multiple) for _ in shape[1:]), 1)
        return make_fake_tensor(dtype, shape, stride, assumed_align=16)

    return (
        fake(BFloat16, b, s, k),
        fake(Uint8, n, cute.sym_int(divisibility=16), multiple=16),
        fake(Uint8, cute.sym_int(divisibility=16)),
        fake(BFloat16, b, s, n),
        Float32(1.0),
    )
