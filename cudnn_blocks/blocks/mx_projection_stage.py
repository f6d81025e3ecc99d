# SPDX-License-Identifier: Apache-2.0
"""MxProjectionStage: the fused projection of block-scaled operands, whose Q, K and V are MXFP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cudnn_blocks.blocks.composed_stage import ComposedStage, rows_of_codes
from cudnn_blocks.quant_spec import MXFP8, BlockFormat
from cudnn_blocks.stages.copy_rows import copy_rows, load_runtime
from cudnn_blocks.stages.gemm.stage import GemmModes, GemmStage
from cudnn_blocks.stages.quantize.stage import DequantizeStage, QuantizeModes, QuantizeStage
from cudnn_blocks.stages.scratch import carve, padded_bytes
from cudnn_blocks.stages.stage import REFERENCE, Stage
from cudnn_blocks.target import Target
from cudnn_blocks.workspace import WorkspaceLayout

Step = tuple[Stage, Sequence[Any]]
Shapes = tuple[tuple[int, ...], ...]


class MxProjectionStage(ComposedStage):
    """``Q, K, V = M(A(...))`` of the projection slab, with norm and rotation of its FP32 sums.

    Two launches dequantise h and w_qkvg, whose values BF16 holds; one multiplies them, with QK-norm
    and RoPE in its epilogue, into a slab; three code its bands Q, K and V, and a copy takes out
    GATE. The slab is BF16, so that Q, K and V are rounded to it before they become codes. The
    engine is that of the product.

    Operands: h ``[B, S, K]`` and its blob, w_qkvg ``[N, K]`` (K / 2 bytes where two codes share
    one) and its blob, q8 ``[B, S, h_q, D]`` and its blob, k8 and v8 ``[B, S, h_kv, D]`` and theirs,
    gate ``[B, S, h_q, D]``, w_q_norm and w_k_norm or None, cos and sin or None, seq_lens or None,
    scratch. Q and K are scaled along D, V along the tokens below the length.

    Args:
        name: of the slot that the stage fills.
        modes: compile-time facts of the product on BF16, with ``norm_rope``.
        w_format: of w_qkvg.
        extents: the largest B and S.
        target: what to compile for.
        engine: pin of the product.
        eps: added to the mean square.
        has_seq_lens: seq_lens is given.
        device: of the samples.
    """

    name = "mx_projection"
    rows = rows_of_codes(GemmStage.rows, "tests/unit/test_gated_attention_mx_projection.py")

    def __init__(
        self,
        name: str,
        modes: GemmModes,
        w_format: BlockFormat,
        extents: tuple[int, int],
        target: Target,
        engine: str | None = None,
        *,
        eps: float,
        has_seq_lens: bool,
        device: torch.device,
    ) -> None:
        batch, tokens = extents
        rows = batch * tokens
        self._gemm = GemmStage(name, modes, rows, target, engine, eps=eps, device=device)
        super().__init__(self._gemm.facts, target, engine)
        self.name = name  # type: ignore[misc]  # of its slot
        self._extents = extents
        self._w_format = w_format
        self._dequantize = [
            DequantizeStage(name, QuantizeModes(fmt.name, 1, modes.k), extent, target)
            for fmt, extent in ((MXFP8, rows), (w_format, modes.n))
        ]
        norm_rope = modes.norm_rope
        assert norm_rope is not None, f"{name}: a plain product"
        self._heads, self._d_head = norm_rope.heads, norm_rope.d_head

        def quantize(heads: int, *, is_v: bool = False) -> QuantizeStage:
            layout = (self._d_head, modes.dtype, is_v, is_v and has_seq_lens)
            return QuantizeStage(name, QuantizeModes(MXFP8.name, heads, *layout), tokens, target)

        h_q, _, h_k, h_v = self._heads
        self._quantize = [quantize(h_q), quantize(h_k), quantize(h_v, is_v=True)]

    @property
    def _parts(self) -> list[Stage]:
        return [self._gemm, *self._dequantize, *self._quantize]

    def book(self, layout: WorkspaceLayout) -> None:
        """BF16 values of h and w_qkvg, and the slab."""
        layout.book_scratch(sum(padded_bytes(shape) for shape in self._held(*self._extents)))

    def _held(self, batch: int, tokens: int) -> Shapes:
        n, k = self._gemm.modes.n, self._gemm.modes.k
        return (batch, tokens, k), (n, k), (batch, tokens, n)

    def compile(self) -> None:
        """Compiles every kernel, and loads what copies."""
        super().compile()
        if self.engine != REFERENCE:
            load_runtime()

    def launch(self, operands: Sequence[Any], stream: int) -> None:
        """Six launches and a copy, one after the other."""
        steps, band, gate = self._wire(operands)
        for part, own in steps:
            part.launch(own, stream)
        copy_rows(band, gate, stream)

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        steps, band, gate = self._wire(operands)
        for part, own in steps:
            part.run_reference(own)
        gate.copy_(band)

    def smem_bytes(self) -> int:
        """Shared memory of one CTA of the product."""
        return self._gemm.smem_bytes()

    def describe(self) -> str:
        """The product's modes, and what surrounds it."""
        formats = f"{MXFP8} x {self._w_format}"
        return f"{self._gemm.describe()}, of dequantised {formats}, to {MXFP8}"

    def _wire(self, operands: Sequence[Any]) -> tuple[list[Step], torch.Tensor, torch.Tensor]:
        """The launches, each with its operands, and what the copy reads and writes."""
        h, h_sf, w, w_sf, *coded, gate, w_q_norm, w_k_norm, cos, sin, seq_lens, scratch = operands
        h_values, w_values, slab = carve(scratch, self._held(*h.shape[:2]))
        product = (h_values, w_values, slab, w_q_norm, w_k_norm, cos, sin)
        q, band, k, v = slab.unflatten(-1, (-1, self._d_head)).split(self._heads, dim=2)
        pairs = zip(coded[::2], coded[1::2], strict=True)
        bands = ((one, *pair, seq_lens) for one, pair in zip((q, k, v), pairs, strict=True))
        steps: list[Step] = [
            *zip(self._dequantize, ((h, h_sf, h_values), (w, w_sf, w_values)), strict=True),
            (self._gemm, product),
            *zip(self._quantize, bands, strict=True),
        ]
        return steps, band.flatten(2), gate.flatten(2)
