# SPDX-License-Identifier: Apache-2.0
"""Operands that both GEMM kernels take."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_fake_tensor

from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.gemm.epilogues import NormRope, element_bytes

VECTOR_BYTES = 16
VEC = 8  # 16-bit elements of a vector


@dataclass(frozen=True)
class Band:
    """Where the codes of some neighbouring columns of the projection go."""

    address: Int64
    """Of the first row's first code."""
    pitch: Int64
    column: Int32
    """Within the band."""
    scale: Float32
    is_inside: Boolean
    """False past the last band, and where columns stay BF16."""

    def pointer(self, offset: Int64) -> cute.Pointer:
        """A code; ``offset`` is a multiple of 8."""
        address = self.address + offset
        return cute.make_ptr(Uint8, address, cute.AddressSpace.gmem, assumed_align=VEC)


@dataclass(frozen=True)
class CodedBands:
    """Q, K and V in codes, ``(ROWS, COLUMNS)`` each, and what their values are multiplied by."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    scale_q: Float32
    scale_k: Float32
    scale_v: Float32

    @cute.jit
    def band(self, facts: cutlass.Constexpr[NormRope], column: Int32) -> Band:
        """The band of a column; the other columns of its head are in it too."""
        first_k = facts.first_k_head * facts.d_head
        first_v = first_k + facts.h_kv * facts.d_head
        end = first_v + facts.h_kv * facts.d_head
        address, pitch = self.mQ.iterator.toint(), Int64(self.mQ.stride[0])
        first, scale = Int32(0), self.scale_q
        if column >= first_k:
            address, pitch = self.mK.iterator.toint(), Int64(self.mK.stride[0])
            first, scale = Int32(first_k), self.scale_k
        if column >= first_v:
            address, pitch = self.mV.iterator.toint(), Int64(self.mV.stride[0])
            first, scale = Int32(first_v), self.scale_v
        is_inside = ~self.is_gate(facts, column) & (column < end)
        return Band(address, pitch, column - first, scale, is_inside)

    @cute.jit
    def is_gate(self, facts: cutlass.Constexpr[NormRope], column: Int32) -> Boolean:
        """Whether the column belongs to the band that stays BF16."""
        width = facts.h_q * facts.d_head
        return (column >= width) & (column < 2 * width)


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
    bands: CodedBands | None = None
    """Q, K and V in codes; None for a slab of values."""


@cute.jit
def rows_of(mX: cute.Tensor) -> cute.Tensor:
    """``[B, S, C]`` as ``[B * S, C]``; its rows lie at one pitch."""
    b, s, c = mX.shape
    pitch = mX.stride[0] if s == 1 else mX.stride[1]
    vec = VECTOR_BYTES * 8 // mX.element_type.width
    layout = cute.make_layout((b * s, c), stride=(cute.assume(pitch, divby=vec), 1))
    return cute.make_tensor(mX.iterator, layout)


def fake_operands(config) -> tuple:
    """Fake tensors in ``__call__`` order, without the stream; heads and RoPE alone are static."""
    b, s = cute.sym_int(), cute.sym_int()
    n, k = (cute.sym_int(divisibility=VEC) for _ in range(2))
    facts, output = config.norm_rope, DTYPES[config.output_dtype]
    code_vec = VECTOR_BYTES // element_bytes(config.dtype)

    def fake(*shape, multiple=VEC, dtype=output):
        stride = (*(cute.sym_int64(divisibility=multiple) for _ in shape[1:]), 1)
        return make_fake_tensor(dtype, shape, stride, assumed_align=16)

    codes = DTYPES[config.dtype]
    x, w = (fake(*shape, multiple=code_vec, dtype=codes) for shape in ((b, s, k), (n, k)))
    product = (x, w, fake(b, s, n))
    if facts is None:
        return (*product, Float32(1.0)) if config.is_scaled else product
    weight = fake(facts.d_head) if facts.has_norm else None
    table = None
    if facts.rope_dim:
        multiple = facts.table_multiple(facts.rope_dim)
        table = fake(b, cute.sym_int(), facts.rope_dim, multiple=multiple)
    small = (weight, weight, table, table, Float32(1e-6))
    if not config.is_fp8:
        return (*product, *small)
    q8, k8, v8 = (fake(b, s, cute.sym_int(divisibility=VEC), dtype=codes) for _ in range(3))
    gate = fake(b, s, cute.sym_int(divisibility=VEC))
    return (x, w, q8, k8, v8, gate, *small, *(Float32(1.0) for _ in range(4)))
