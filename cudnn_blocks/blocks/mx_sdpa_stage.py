# SPDX-License-Identifier: Apache-2.0
"""MxSdpaStage: attention of MXFP8 codes, which become BF16 in the engine's scratch first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cudnn_blocks.blocks.composed_stage import ComposedStage, rows_of_codes
from cudnn_blocks.quant_spec import MXFP8
from cudnn_blocks.stages.attention.stage import SdpaModes, SdpaStage
from cudnn_blocks.stages.quantize.portable_config import FP8
from cudnn_blocks.stages.quantize.stage import DequantizeStage, QuantizeModes, QuantizeStage
from cudnn_blocks.stages.scratch import VALUES, carve, padded_bytes
from cudnn_blocks.stages.stage import Stage
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec
from cudnn_blocks.workspace import WorkspaceLayout

Step = tuple[Stage, Sequence[Any]]


class MxSdpaStage(ComposedStage):
    """Attention of MXFP8 codes: three launches dequantise them, a fifth may code the result.

    A code times its scale fits BF16, so that the attention sees the values exactly. The engine is
    that of the attention.

    Operands: q8 ``[B, S, h_q, D]`` and its blob, k8 and v8 ``[B, S, h_kv, D]`` and theirs, o
    ``[B, S, h_q, D]``, gate or None, lse or None, seq_lens or None, scratch. o is BF16, or e4m3 of
    ``scale_o``, which is read at every launch.

    Args:
        modes: compile-time facts of the attention on BF16.
        scale: factor of the scores.
        samples: of q8, k8, v8 and o.
        target: what to compile for.
        engine: pin of the attention.
        has_o_codes: o is e4m3.
    """

    name = "sdpa"
    rows = rows_of_codes(SdpaStage.rows, "tests/unit/test_gated_attention_precision.py")

    def __init__(
        self,
        modes: SdpaModes,
        scale: float,
        samples: Sequence[TensorSpec],
        target: Target,
        engine: str | None = None,
        *,
        has_o_codes: bool = False,
    ) -> None:
        values = [TensorSpec.contiguous(one.shape, VALUES, one.device) for one in samples]
        tokens = values[0].shape[1]
        self._sdpa = SdpaStage(modes, scale, values, target, engine)
        super().__init__(self._sdpa.facts, target, engine)

        def quantized(fmt: str, heads: int, along_tokens: bool = False) -> QuantizeModes:
            return QuantizeModes(fmt, heads, modes.d_head, along_tokens=along_tokens)

        self._dequantize = [
            DequantizeStage(self.name, quantized(MXFP8.name, heads, is_v), tokens, target)
            for heads, is_v in ((modes.h_q, False), (modes.h_kv, False), (modes.h_kv, True))
        ]
        self._quantize = None
        if has_o_codes:
            self._quantize = QuantizeStage(self.name, quantized(FP8, modes.h_q), tokens, target)
        held = values if has_o_codes else values[:3]
        self._scratch_bytes = sum(padded_bytes(value.shape) for value in held)
        self.scale_o = 1.0

    @property
    def scale_o(self) -> float:
        """What a value of o is multiplied by before it becomes a code."""
        return self._scale_o

    @scale_o.setter
    def scale_o(self, scale_o: float) -> None:
        self._scale_o = scale_o
        if self._quantize is not None:
            self._quantize.scale = scale_o

    @property
    def _parts(self) -> list[Stage]:
        return [self._sdpa, *self._dequantize, *([self._quantize] if self._quantize else [])]

    def book(self, layout: WorkspaceLayout) -> None:
        """BF16 values of q, k and v, and of o where it becomes codes."""
        layout.book_scratch(self._scratch_bytes)

    def launch(self, operands: Sequence[torch.Tensor | None], stream: int) -> None:
        """All launches, one after the other."""
        for part, own in self._steps(operands):
            part.launch(own, stream)

    def run_reference(self, operands: Sequence[torch.Tensor | None]) -> None:
        """Runs in torch."""
        for part, own in self._steps(operands):
            part.run_reference(own)

    def smem_bytes(self) -> int:
        """Shared memory of one CTA of the attention."""
        return self._sdpa.smem_bytes()

    def describe(self) -> str:
        """The attention's modes."""
        return f"{self._sdpa.describe()}, of dequantised {MXFP8}"

    def check_extents(self, batch: int, num_rows: int, num_keys: int) -> None:
        """As SdpaStage."""
        self._sdpa.check_extents(batch, num_rows, num_keys)

    def _steps(self, operands: Sequence[Any]) -> Iterator[Step]:
        *coded, o, gate, lse, seq_lens, scratch = operands
        codes, blobs = coded[::2], coded[1::2]
        held = codes if self._quantize is None else [*codes, o]
        values = carve(scratch, [one.shape for one in held])
        result = o if self._quantize is None else values.pop()
        yield from zip(self._dequantize, zip(codes, blobs, values, strict=True), strict=True)
        yield self._sdpa, (*values, result, gate, lse, seq_lens)
        if self._quantize is not None:
            yield self._quantize, (result, o)
