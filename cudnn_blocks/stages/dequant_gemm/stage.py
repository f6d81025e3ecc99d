# SPDX-License-Identifier: Apache-2.0
"""The matrix product with block-scaled weights: engines, compile, launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks.quant_spec import BLOCK_FORMATS, BlockFormat
from cudnn_blocks.reference import dequant_gemm as reference
from cudnn_blocks.stages.capabilities import Capabilities, Constraint, OneOf
from cudnn_blocks.stages.constraints import MultipleOf, UpTo
from cudnn_blocks.stages.dequant_gemm import portable_e2m1_config as e2m1
from cudnn_blocks.stages.dequant_gemm import portable_e4m3_config as e4m3
from cudnn_blocks.stages.gated_attention.evidence import TESTED
from cudnn_blocks.stages.gemm.stage import DSL, HOPPER, MAX_ROWS, PORTABLE, GemmModes, GemmStage
from cudnn_blocks.stages.kernel_stage import KernelChoice, KernelStage
from cudnn_blocks.stages.quantize.stage import DequantizeStage, QuantizeModes
from cudnn_blocks.stages.scratch import carve, padded_bytes
from cudnn_blocks.stages.stage import REFERENCE, Stage
from cudnn_blocks.target import GPU_TARGET_NAMES, Target
from cudnn_blocks.workspace import WorkspaceLayout

EVIDENCE = {"sm_90a": "benchmarks/results/nvidia-h200/dequant_gemm.json"}
MAX_DECODE_ROWS = 128
"""Rows up to which weights become BF16 in registers, on their way to the tensor cores."""

_FORMATS: Mapping[str, Constraint] = {
    "w_format": OneOf(tuple(BLOCK_FORMATS)),
    "x_format": OneOf(("bf16", *BLOCK_FORMATS)),
}
_SERVED: Mapping[str, Constraint] = {
    **_FORMATS,
    "n": MultipleOf(8),
    "k": MultipleOf(32),
    "rows": UpTo(MAX_ROWS),
}


@dataclass(frozen=True)
class DequantGemmModes:
    """Sizes and compile-time facts."""

    n: int
    """Columns of y."""
    k: int
    """Columns of x."""
    w_format: BlockFormat
    x_format: BlockFormat | None = None
    """None for BF16 values."""


class DecodeStage(KernelStage):
    """The product on few rows; operands x ``[B, S, K]``, w, w_sf, y ``[B, S, N]``.

    Args:
        name: of the slot that the stage fills.
        modes: sizes and the format of w; x is BF16.
        num_rows: the largest B * S.
        target: what to compile for.
    """

    name = "dequant_gemm"
    rows = (Capabilities(PORTABLE, OneOf(GPU_TARGET_NAMES), _SERVED, DSL, EVIDENCE),)

    def __init__(self, name: str, modes: DequantGemmModes, num_rows: int, target: Target) -> None:
        super().__init__(_facts(modes, num_rows), target)
        self.name = name  # type: ignore[misc]  # a block has several of these, each in its slot
        self.alpha = 1.0
        self._kernel = _decode_kernel(modes, num_rows, target)

    def _choose_kernel(self) -> KernelChoice:
        return self._kernel

    def _kernel_operands(self, operands: Sequence[Any]) -> Sequence[Any]:
        x, w, w_sf, y = operands
        return x, w.view(torch.uint8), w_sf.view(torch.uint8).view(-1), y, self.alpha

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Never chosen: the whole stage has its reference."""
        raise AssertionError(f"{self.name}: no reference of a part")

    def describe(self) -> str:
        """The tile."""
        return str(self._kernel.config)


def _decode_kernel(modes: DequantGemmModes, num_rows: int, target: Target) -> KernelChoice:
    """By the codes of w."""
    folder, (n, k), block = "cudnn_blocks.stages.dequant_gemm", (modes.n, modes.k), modes.w_format
    if block.codes_per_byte == 1:
        by_row = e4m3.E4m3DecodeConfig.from_geometry(num_rows, n, k, target)
        kernel = f"{folder}.portable_e4m3.E4m3DecodeKernel"
        return KernelChoice(kernel, by_row, e4m3.smem_bytes(by_row))
    by_table = e2m1.E2m1DecodeConfig.from_geometry(
        num_rows, n, k, target, block_size=block.block_size
    )
    kernel = f"{folder}.portable_e2m1.E2m1DecodeKernel"
    return KernelChoice(kernel, by_table, e2m1.smem_bytes(by_table))


class DequantGemmStage(Stage):
    """``y = B(alpha * x @ W.T)`` with W of block-scaled codes, and x of BF16 values or codes too.

    Operands: x ``[B, S, K]``, x_sf or None, w ``[N, K]`` (K / 2 bytes where two codes share one),
    w_sf, y ``[B, S, N]``, scratch or None. Few rows take one launch, in which weights become BF16
    in registers; for more rows they become BF16 in scratch first. So do codes of x, in a launch
    of their own. Which it is depends on ``num_rows``, not on the call.

    Args:
        name: of the slot that the stage fills.
        modes: sizes and formats.
        num_rows: the largest B * S.
        target: what to compile for.
        engine: pin.
        alpha: factor of the sums; read at every launch.
    """

    name = "dequant_gemm"
    rows = (
        Capabilities(HOPPER, OneOf(("sm_90a",)), _SERVED, DSL, EVIDENCE),
        Capabilities(PORTABLE, OneOf(GPU_TARGET_NAMES), _SERVED, DSL, TESTED),
        Capabilities(
            engine=REFERENCE,
            targets=OneOf(("cpu",)),
            serves=_FORMATS,
            evidence={"cpu": "tests/unit/test_dequant_gemm_reference.py"},
        ),
    )

    def __init__(
        self,
        name: str,
        modes: DequantGemmModes,
        num_rows: int,
        target: Target,
        engine: str | None = None,
        *,
        alpha: float = 1.0,
    ) -> None:
        super().__init__(_facts(modes, num_rows), target, engine)
        self.name = name  # type: ignore[misc]  # as above
        self.modes = modes
        self.num_rows = num_rows
        self.alpha = alpha
        self._parts: list[Any] = []

    @property
    def is_decode(self) -> bool:
        """One launch on weights in codes."""
        return self.num_rows <= MAX_DECODE_ROWS

    def check(self) -> None:
        """Chooses the engine, and those of the launches."""
        super().check()
        if self.engine == REFERENCE:
            return
        modes, target = self.modes, self.target
        self._parts = [
            DequantizeStage(self.name, QuantizeModes(fmt.name, 1, modes.k), rows, target)
            for fmt, rows in self._held()
        ]
        if self.is_decode:
            self._parts.append(DecodeStage(self.name, modes, self.num_rows, target))
        else:
            values = GemmModes(modes.n, modes.k, "bf16", has_alpha=True)
            self._parts.append(GemmStage(self.name, values, self.num_rows, target, self.engine))
        for part in self._parts:
            part.check()

    def _held(self) -> Iterator[tuple[BlockFormat, int]]:
        """Formats and rows of what becomes BF16 in scratch: of x, then of w."""
        if self.modes.x_format is not None:
            yield self.modes.x_format, self.num_rows
        if not self.is_decode:
            yield self.modes.w_format, self.modes.n

    def book(self, layout: WorkspaceLayout) -> None:
        """BF16 values of x and w, where they need a place."""
        if self.engine != REFERENCE and self.scratch_bytes:
            layout.book_scratch(self.scratch_bytes)

    @property
    def scratch_bytes(self) -> int:
        """Of all values at the largest extents."""
        return sum(padded_bytes((rows, self.modes.k)) for _, rows in self._held())

    def compile(self) -> None:
        """Compiles every kernel."""
        for part in self._parts:
            part.compile()

    def launch(self, operands: Sequence[Any], stream: int) -> None:
        """One launch to three."""
        x, x_sf, w, w_sf, y, scratch = operands
        *dequantize, product = self._parts
        has_x_codes = self.modes.x_format is not None
        coded: list[tuple[Any, Any, Sequence[int]]] = []
        if has_x_codes:
            coded.append((x, x_sf, (*x.shape[:-1], self.modes.k)))
        if not self.is_decode:
            coded.append((w, w_sf, (self.modes.n, self.modes.k)))
        values = carve(scratch, [shape for *_, shape in coded])
        for part, (codes, blob, _), one in zip(dequantize, coded, values, strict=True):
            part.launch((codes, blob, one), stream)
        weights = (w, w_sf) if self.is_decode else (values.pop(),)
        product.alpha = self.alpha
        product.launch((values.pop() if has_x_codes else x, *weights, y), stream)

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        x, x_sf, w, w_sf, y, _ = operands
        modes = self.modes
        reference.dequant_gemm(x, x_sf, w, w_sf, y, self.alpha, modes.x_format, modes.w_format)

    def smem_bytes(self) -> int:
        """Shared memory of one CTA of the product."""
        return self._parts[-1].smem_bytes() if self._parts else 0

    def describe(self) -> str:
        """Sizes, formats, and the tile of the product."""
        modes = self.modes
        sizes = f"N={modes.n}, K={modes.k}, {modes.x_format or 'bf16'} x {modes.w_format}"
        if self.engine == REFERENCE:
            return f"{sizes}, allocates"
        where = "in registers" if self.is_decode else "in scratch"
        return f"{sizes} to BF16 {where}: {self._parts[-1].describe()}"


def _facts(modes: DequantGemmModes, num_rows: int) -> dict[str, object]:
    return {
        "w_format": modes.w_format.name,
        "x_format": "bf16" if modes.x_format is None else modes.x_format.name,
        "n": modes.n,
        "k": modes.k,
        "rows": num_rows,
    }
