# SPDX-License-Identifier: Apache-2.0
"""The stages that quantise to e4m3 or to a block format, and back to BF16."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks.quant_spec import BLOCK_FORMATS, BlockFormat
from cudnn_blocks.reference import quantize as reference
from cudnn_blocks.stages.capabilities import Capabilities, Constraint, OneOf
from cudnn_blocks.stages.constraints import MultipleOf, UpTo
from cudnn_blocks.stages.gated_attention.evidence import CODES
from cudnn_blocks.stages.kernel_stage import KernelChoice, KernelStage
from cudnn_blocks.stages.quantize.portable_config import (
    DEQUANTIZE_VEC,
    FP8,
    VEC,
    DequantizeConfig,
    QuantizeConfig,
    smem_bytes,
)
from cudnn_blocks.stages.stage import REFERENCE
from cudnn_blocks.stages.toolchain import DslRequirement
from cudnn_blocks.target import GPU_TARGET_NAMES, Target

PORTABLE = "portable"
DSL = DslRequirement((4, 8, 1))
MAX_BATCH_VECS = 2**31 - 2**16
"""Vectors of one batch, the padding of its scales included, which kernels number in 32 bits."""
ALONG_TOKENS = "mxfp8 along tokens"
FORMATS = (FP8, *BLOCK_FORMATS, ALONG_TOKENS)
"""What the stages are asked for; blocks lie along channels where nothing else is said."""

_QUANTIZED: dict[str, Constraint] = {
    "format": OneOf(("fp16 to fp8", *(f"bf16 to {name}" for name in FORMATS)))
}
_DEQUANTIZED: dict[str, Constraint] = {"format": OneOf(FORMATS)}


@dataclass(frozen=True)
class QuantizeModes:
    """Compile-time facts of values ``[B, S, heads, d_head]``, or of rows, which are one head."""

    fmt: str
    """``fp8``, or the name of a block format."""
    heads: int
    d_head: int
    dtype: str = "bf16"
    """``bf16`` or ``fp16``, of the values."""
    along_tokens: bool = False
    """Blocks of tokens instead of channels."""
    has_seq_lens: bool = False

    @property
    def block(self) -> BlockFormat | None:
        """The block format, or None per tensor."""
        return BLOCK_FORMATS.get(self.fmt)

    @property
    def format_name(self) -> str:
        """The format, and where its blocks lie."""
        return f"{self.fmt} along tokens" if self.along_tokens else self.fmt

    def __str__(self) -> str:
        return f"{self.format_name}, {self.dtype}, heads={self.heads}, D={self.d_head}"


class QuantizeStage(KernelStage):
    """One launch; operands x, codes, and in a block format its blob; then seq_lens or None.

    x is ``[B, S, heads, D]`` with codes of the same shape, two to a byte in e2m1, and one blob per
    (b, head); or ``[rows, D]`` or ``[B, S, D]`` of one pitch, which is one array of rows with one
    blob. Blobs and codes are their own dtype or uint8.

    Args:
        name: of the slot that the stage fills.
        modes: compile-time facts.
        max_tokens: the largest S, or number of rows.
        target: what to compile for.
        engine: pin.
        scale: per tensor, what values are multiplied by; an argument of the kernel, read at every
            launch.
    """

    name = "quantize"
    rows = (
        Capabilities(
            engine=PORTABLE,
            targets=OneOf(GPU_TARGET_NAMES),
            serves={
                **_QUANTIZED,
                "d_head": MultipleOf(VEC),
                "batch_vecs": UpTo(MAX_BATCH_VECS),
            },
            dsl=DSL,
            evidence=CODES,
        ),
        Capabilities(
            engine=REFERENCE,
            targets=OneOf(("cpu",)),
            serves=_QUANTIZED,
            evidence={"cpu": "tests/unit/test_quantize_reference.py"},
        ),
    )

    def __init__(
        self,
        name: str,
        modes: QuantizeModes,
        max_tokens: int,
        target: Target,
        engine: str | None = None,
        *,
        scale: float = 1.0,
    ) -> None:
        self._config = QuantizeConfig.from_geometry(target, **dataclasses.asdict(modes))
        facts = {
            "format": f"{modes.dtype} to {modes.format_name}",
            "d_head": modes.d_head,
            "batch_vecs": self._config.batch_vecs(max_tokens),
        }
        super().__init__(facts, target, engine)
        self.name = name  # type: ignore[misc]  # a block has several of these, each in its slot
        self.modes = modes
        self.scale = scale

    def _choose_kernel(self) -> KernelChoice:
        kernel = "cudnn_blocks.stages.quantize.portable.QuantizeKernel"
        return KernelChoice(kernel, self._config, smem_bytes(self._config))

    def _kernel_operands(self, operands: Sequence[Any]) -> Sequence[Any]:
        return *self._tensors(operands), self.scale

    def _tensors(self, operands: Sequence[Any]) -> Sequence[Any]:
        x, codes, blob, seq_lens = _filled(operands, 4)
        if blob is not None:
            blob = blob.view(torch.uint8).view(-1)
        if not self.modes.has_seq_lens:
            seq_lens = None
        return _heads(x), _heads(codes.view(torch.uint8)), blob, seq_lens

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        x, codes, blob, seq_lens, scale = self._kernel_operands(operands)
        if self.modes.block is None:
            reference.quantize_fp8(x, codes, scale)
        else:
            reference.quantize_block(
                x,
                codes,
                blob,
                self.modes.block,
                along_tokens=self.modes.along_tokens,
                seq_lens=seq_lens,
            )

    def describe(self) -> str:
        """Format and sizes that are compiled in."""
        return _described(self.modes, self.engine)


class QuantizeKvStage(QuantizeStage):
    """K and V per tensor, a launch of one kernel each; operands k, k8, v, v8.

    ``scale_k`` and ``scale_v`` are read at every launch.
    """

    scale_k = 1.0
    scale_v = 1.0

    def launch(self, operands: Sequence[torch.Tensor | None], stream: int) -> None:
        """Two launches."""
        for scale, pair in self._pairs(operands):
            self._call(*self._tensors(pair), scale, stream)  # type: ignore[misc]

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        for scale, pair in self._pairs(operands):
            x, codes, *_ = self._tensors(pair)
            reference.quantize_fp8(x, codes, scale)

    def _pairs(self, operands: Sequence[Any]) -> Sequence[tuple[float, Sequence[Any]]]:
        return (self.scale_k, operands[:2]), (self.scale_v, operands[2:])


class DequantizeStage(KernelStage):
    """One launch; operands codes, blob (None per tensor) and y, in the forms of QuantizeStage.

    Args:
        name: of the slot that the stage fills.
        modes: compile-time facts; y is BF16.
        max_tokens: the largest S, or number of rows.
        target: what to compile for.
        engine: pin.
        descale: per tensor, what codes are multiplied by; read at every launch.
    """

    name = "dequantize"
    rows = (
        Capabilities(
            engine=PORTABLE,
            targets=OneOf(GPU_TARGET_NAMES),
            serves={
                **_DEQUANTIZED,
                "d_head": MultipleOf(DEQUANTIZE_VEC),
                "batch_vecs": UpTo(MAX_BATCH_VECS),
            },
            dsl=DSL,
            evidence=CODES,
        ),
        Capabilities(
            engine=REFERENCE,
            targets=OneOf(("cpu",)),
            serves=_DEQUANTIZED,
            evidence={"cpu": "tests/unit/test_quantize_reference.py"},
        ),
    )

    def __init__(
        self,
        name: str,
        modes: QuantizeModes,
        max_tokens: int,
        target: Target,
        engine: str | None = None,
        *,
        descale: float = 1.0,
    ) -> None:
        self._config = DequantizeConfig.from_geometry(
            target,
            fmt=modes.fmt,
            heads=modes.heads,
            d_head=modes.d_head,
            along_tokens=modes.along_tokens,
        )
        facts = {
            "format": modes.format_name,
            "d_head": modes.d_head,
            "batch_vecs": self._config.batch_vecs(max_tokens),
        }
        super().__init__(facts, target, engine)
        self.name = name  # type: ignore[misc]  # as above
        self.modes = modes
        self.descale = descale

    def _choose_kernel(self) -> KernelChoice:
        kernel = "cudnn_blocks.stages.quantize.portable_dequantize.DequantizeKernel"
        return KernelChoice(kernel, self._config, smem_bytes(self._config))

    def _kernel_operands(self, operands: Sequence[Any]) -> Sequence[Any]:
        codes, blob, y = operands
        if blob is not None:
            blob = blob.view(torch.uint8).view(-1)
        return _heads(codes.view(torch.uint8)), blob, _heads(y), self.descale

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        codes, blob, y, descale = self._kernel_operands(operands)
        if self.modes.block is None:
            reference.dequantize_fp8(codes, y, descale)
        else:
            block, along_tokens = self.modes.block, self.modes.along_tokens
            reference.dequantize_block(codes, blob, y, block, along_tokens=along_tokens)

    def describe(self) -> str:
        """Format and sizes that are compiled in."""
        return _described(self.modes, self.engine)


def _described(modes: QuantizeModes, engine: str) -> str:
    return f"{modes}, allocates" if engine == REFERENCE else str(modes)


def _filled(operands: Sequence[Any], count: int) -> list[Any]:
    return [*operands, *[None] * (count - len(operands))]


def _heads(x: torch.Tensor) -> torch.Tensor:
    """``[B, S, H, D]`` as it is; rows of one pitch as ``[1, rows, 1, D]``."""
    if x.dim() == 4:
        return x
    rows, width = x.shape[:-1].numel(), x.shape[-1]
    steps = [step for n, step in zip(x.shape[:-1], x.stride(), strict=False) if n > 1]
    pitch = steps[-1] if steps else width
    return x.as_strided((1, rows, 1, width), (rows * pitch, pitch, width, 1))
