# SPDX-License-Identifier: Apache-2.0
"""What both products of a few activations with block-scaled weights take, and how they end."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.runtime import make_fake_tensor

from cudnn_blocks.stages.dequant_gemm.portable_layout import BLOB_COLUMNS, STORE

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


def blob_columns(operands: Operands, block_size: int) -> Int32:
    """Of 4 scales, in a row of the blob."""
    blocks = operands.mX.shape[1] // block_size
    return (blocks - 1) // BLOB_COLUMNS + 1


@cute.jit
def load_sums(
    sPart: cute.Tensor, offset: Int32, rank: int, splits: cutlass.Constexpr[int]
) -> cute.Tensor:
    """``STORE`` sums of a CTA of the cluster."""
    ptr = sPart.iterator + cute.assume(offset, divby=STORE)
    if const_expr(splits > 1):
        ptr = cute.arch.map_dsmem_ptr(ptr, Int32(rank))
    rPart = cute.make_rmem_tensor(STORE, Float32)
    cute.autovec_copy(cute.make_tensor(ptr, cute.make_layout(STORE)), rPart)
    return rPart


@cute.jit
def store_outputs(operands: Operands, rSum: cute.Tensor, y_row: Int32, column: Int32) -> None:
    """``STORE`` outputs of neighbouring columns, where they exist."""
    if column < operands.mY.shape[1]:
        rY = cute.make_rmem_tensor(STORE, BFloat16)
        rY.store((rSum.load() * operands.alpha).to(BFloat16))
        offset = Int64(y_row) * operands.mY.stride[0] + column
        y_ptr = operands.mY.iterator + cute.assume(offset, divby=STORE)
        cute.autovec_copy(rY, cute.make_tensor(y_ptr, cute.make_layout(STORE)))


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
