# SPDX-License-Identifier: Apache-2.0
"""What the host calls of every GEMM kernel, Hopper's and the portable one: operands in their order.

Each class is a base of a kernel class, whose ``launch(x, w, y, operands, alpha, stream)`` does the
work; ``operands`` are those of norm and RoPE, None for a plain product, and ``alpha`` is None where
there is no factor.
"""

import cutlass.cute as cute
from cutlass import Float32

from cudnn_blocks.stages.gemm.portable_operands import CodedBands, NormRopeOperands, rows_of


class Plain:
    """A plain product."""

    @cute.jit
    def __call__(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream):
        self.launch(x, w, y, None, None, stream)


class Scaled:
    """A plain product with a factor, as codes have it."""

    @cute.jit
    def __call__(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, alpha: Float32, stream):
        self.launch(x, w, y, None, alpha, stream)


class NormRoped:
    """The fused projection."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        y: cute.Tensor,
        w_q_norm: cute.Tensor | None,
        w_k_norm: cute.Tensor | None,
        cos: cute.Tensor | None,
        sin: cute.Tensor | None,
        eps: Float32,
        stream,
    ):
        seq_len = cute.fast_divmod_create_divisor_v2(x.shape[1])
        operands = NormRopeOperands(w_q_norm, w_k_norm, cos, sin, seq_len, eps)
        self.launch(x, w, y, operands, None, stream)


class CodedNormRoped:
    """The fused projection of codes, whose Q, K and V become codes too."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        q8: cute.Tensor,
        k8: cute.Tensor,
        v8: cute.Tensor,
        gate: cute.Tensor,
        w_q_norm: cute.Tensor | None,
        w_k_norm: cute.Tensor | None,
        cos: cute.Tensor | None,
        sin: cute.Tensor | None,
        eps: Float32,
        alpha: Float32,
        scale_q: Float32,
        scale_k: Float32,
        scale_v: Float32,
        stream,
    ):
        seq_len = cute.fast_divmod_create_divisor_v2(x.shape[1])
        bands = CodedBands(rows_of(q8), rows_of(k8), rows_of(v8), scale_q, scale_k, scale_v)
        operands = NormRopeOperands(w_q_norm, w_k_norm, cos, sin, seq_len, eps, bands)
        self.launch(x, w, gate, operands, alpha, stream)
