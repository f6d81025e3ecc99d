# SPDX-License-Identifier: Apache-2.0
"""Operands that both GEMM kernels take."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_tensor

from cudnn_blocks.stages.device.dtypes import DTYPES

VEC = 8  # elements of one 16-byte access


@dataclass(frozen=True)
class NormRopeOperands:
    """What QK-norm and RoPE read beside the accumulators, None where absent."""

    mWq: cute.Tensor | None
    mWk: cute.Tensor | None
    mCos: cute.Tensor | None
    mSin: cute.Tensor | None
    seq_len: cute.FastDivmodDivisorV2
    """Rows of one batch entry."""
    eps: Float32


@cute.jit
def rows_of(mX: cute.Tensor) -> cute.Tensor:
    """``[B, S, C]`` as ``[B * S, C]``; its rows lie at one pitch."""
    b, s, c = mX.shape
    pitch = mX.stride[0] if s == 1 else mX.stride[1]
    layout = cute.make_layout((b * s, c), stride=(cute.assume(pitch, divby=VEC), 1))
    return cute.make_tensor(mX.iterator, layout)


def fake_operands(config) -> tuple:
    """Fake tensors in ``__call__`` order, without the stream; heads and RoPE alone are static."""
    b, s = cute.sym_int(), cute.sym_int()
    n, k = (cute.sym_int(divisibility=VEC) for _ in range(2))
    dtype, facts = DTYPES[config.dtype], config.norm_rope

    def fake(*shape, multiple=VEC):
        stride = (*(cute.sym_int64(divisibility=multiple) for _ in shape[1:]), 1)
        return make_fake_tensor(dtype, shape, stride, assumed_align=16)

    product = (fake(b, s, k), fake(n, k), fake(b, s, n))
    if facts is None:
        return product
    weight = fake(facts.d_head) if facts.has_norm else None
    table = None
    if facts.rope_dim:
        multiple = facts.table_multiple(facts.rope_dim)
        table = fake(b, cute.sym_int(), facts.rope_dim, multiple=multiple)
    return (*product, weight, weight, table, table, Float32(1e-6))
