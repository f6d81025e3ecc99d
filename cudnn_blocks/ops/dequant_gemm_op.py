# SPDX-License-Identifier: Apache-2.0
"""DequantGemm and ``ops.dequant_gemm``: a matrix product with block-scaled weights."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import torch

from cudnn_blocks.api_base import APIBase, Sample, require_type
from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.gemm import GemmGeometry
from cudnn_blocks.operands import Contiguous, Extents, Operand, OperandTable
from cudnn_blocks.ops.allocate import run_on_stream
from cudnn_blocks.ops.library import check_traceable, is_eager, register
from cudnn_blocks.ops.quantize_family import block_format
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.quant_spec import BlockFormat
from cudnn_blocks.reference.scale_blobs import blob_bytes
from cudnn_blocks.stages.dequant_gemm.stage import DequantGemmModes, DequantGemmStage
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.strided import PitchedRows, Strided
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec
from cudnn_blocks.workspace import ENGINE_SCRATCH

_OP_NAME = "dequant_gemm"
_VALUES, _BYTES = torch.bfloat16, torch.uint8
_X_SCALES = "bytes of x_sf"
_VECTOR_BYTES = 16


class DequantGemm(APIBase):
    """A product with weights in codes: ``y = B(alpha * x @ W.T)``, ``W = B(code * scale(block))``.

    Rounding: W is exact within BF16's range, which holds every such product; beyond it BF16's
    largest number stands in, below it the nearest subnormal. Sums are FP32, their product with
    alpha is rounded to FP32 and that to BF16. The order of a sum belongs to the engine and to the
    plan's rows; every run has the same bits.

    A NaN code or scale makes its row of W NaN, and with it a column of y. Padding bytes of the
    blobs are not read for a result. B and S are dynamic, up to the samples' extents; 0 does
    nothing. Codes and blobs have their own dtypes or are uint8.

    Args:
        sample_x: ``[B, S, K]`` BF16, its B * S rows at one pitch, compact or a larger multiple of
            8; with ``x_format`` codes, contiguous.
        sample_w: ``[N, K]`` codes, ``[N, K / 2]`` where two share a byte, low nibble first;
            innermost stride 1, row pitch a multiple of 16 bytes.
        sample_w_sf: scale blob of w in the F8_128x4 order, contiguous.
        sample_y: ``[B, S, N]`` BF16, rows as those of a BF16 x.
        w_format: ``mxfp4``, ``nvfp4`` or ``mxfp8``.
        sample_x_sf: scale blob of x's B * S rows, with ``x_format``.
        x_format: as ``w_format``, or None for BF16.
        alpha: factor of the sums; an argument of the kernel.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``dequant_gemm``.

    Workspace: none for up to 128 rows of BF16; else the BF16 values of W, of x, or of both.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: y and the workspace.

    Raises:
        ContractError: a tensor breaks the contract, or y overlaps another operand.
        NotServedError: a size without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = DequantGemm(x, w, w_sf, y, w_format="mxfp4")
        >>> plan.compile()
        >>> plan.execute(x, w, w_sf, y)

    Source: formats after the OCP MX specification 1.0 and NVIDIA's NVFP4; no code taken.
    """

    op_name = "dequant-gemm"

    def __init__(
        self,
        sample_x: Sample,
        sample_w: Sample,
        sample_w_sf: Sample,
        sample_y: Sample,
        *,
        w_format: str,
        sample_x_sf: Sample | None = None,
        x_format: str | None = None,
        alpha: float = 1.0,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        require_type("w_format", w_format, str)
        require_type("x_format", x_format, str, type(None))
        require_type("alpha", alpha, float)
        samples = {"x": sample_x, "w": sample_w, "w_sf": sample_w_sf, "y": sample_y}
        super().__init__({**samples, "x_sf": sample_x_sf}, None, target=target, engines=engines)
        self._w_format = block_format(w_format)
        self._x_format = None if x_format is None else block_format(x_format)
        self._alpha = alpha

    def execute(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        w_sf: torch.Tensor,
        y: torch.Tensor,
        workspace: torch.Tensor | None = None,
        x_sf: torch.Tensor | None = None,
        current_stream: StreamLike | None = None,
    ) -> None:
        """One product; see the class for every operand."""
        self._launch((x, w, w_sf, y, x_sf), current_stream, workspace)

    def _plan(self) -> None:
        for name, axes in (("x", "B, S, K"), ("w", "N, K")):
            if len(self._specs[name].shape) != axes.count(",") + 1:
                raise ContractError(name, f"shape [{axes}]", list(self._specs[name].shape))
        w = self._specs["w"]
        self.geometry = GemmGeometry(w.shape[0], w.shape[1] * self._w_format.codes_per_byte)
        for one in (self._w_format, self._x_format):
            if one is not None and self.geometry.k % one.block_size:
                raise ContractError("K", f"a multiple of {one.block_size}", self.geometry.k)
        super()._plan()

    def _check_extents(self, extents: Extents) -> None:
        if self._x_format is not None:
            blocks = self.geometry.k // self._x_format.block_size
            expected = blob_bytes(extents["B"] * extents["S"], blocks)
            if extents[_X_SCALES] != expected:
                raise ContractError("x_sf", f"shape [{expected}]", [extents[_X_SCALES]])

    def _is_empty(self, extents: Extents) -> bool:
        return 0 in (extents["B"], extents["S"])

    def _build_operands(self) -> OperandTable:
        n, k, w = self.geometry.n, self.geometry.k, self._w_format
        rows, x = PitchedRows(), Operand("x", _VALUES, ("B", "S", k), PitchedRows())
        has_x_sf = self._x_format is not None
        if self._x_format is not None:
            x = self._codes("x", self._x_format, ("B", "S"), is_packed=True)
        blob = (blob_bytes(n, k // w.block_size),)
        return OperandTable(
            (
                x,
                self._codes("w", w, (n,)),
                Operand("w_sf", self._spelled("w_sf", w.scale_dtype), blob, Contiguous()),
                Operand("y", _VALUES, ("B", "S", n), rows, is_mutated=True),
                Operand(
                    "x_sf",
                    self._spelled("x_sf", (self._x_format or w).scale_dtype),
                    (_X_SCALES,),
                    Contiguous(),
                    is_declared=has_x_sf,
                ),
            )
        )

    def _codes(
        self, name: str, block: BlockFormat, rows: tuple[int | str, ...], *, is_packed: bool = False
    ) -> Operand:
        width = self.geometry.k // block.codes_per_byte
        strides = Contiguous() if is_packed else Strided(math.gcd(_VECTOR_BYTES, width))
        return Operand(name, self._spelled(name, block.code_dtype), (*rows, width), strides)

    def _spelled(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """``dtype``, or uint8 where the sample is that."""
        spec = self._specs.get(name)
        return _BYTES if spec is not None and spec.dtype == _BYTES else dtype

    def _build_stages(
        self, target: Target, engines: Mapping[str, str]
    ) -> tuple[DequantGemmStage, ...]:
        modes = DequantGemmModes(self.geometry.n, self.geometry.k, self._w_format, self._x_format)
        num_rows = self._limits["B"] * self._limits["S"]
        name = DequantGemmStage.name
        pin = engines.get(name)
        return (DequantGemmStage(name, modes, num_rows, target, pin, alpha=self._alpha),)

    def _stage_operands(
        self, operands: Sequence[torch.Tensor | None], workspace: torch.Tensor | None
    ) -> Sequence[Sequence[torch.Tensor | None]]:
        x, w, w_sf, y, x_sf = operands
        scratch = None
        if workspace is not None and self._layout.size_bytes:
            shape = (self._layout.size_bytes,)
            scratch = self._layout.view(workspace, ENGINE_SCRATCH, _BYTES, shape)
        return [(x, x_sf, w, w_sf, y, scratch)]


def dequant_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    w_sf: torch.Tensor,
    w_format: str,
    *,
    x_sf: torch.Tensor | None = None,
    x_format: str | None = None,
    alpha: float = 1.0,
    current_stream: StreamLike | None = None,
) -> torch.Tensor:
    """``alpha * x @ W.T`` with block-scaled weights; see :class:`DequantGemm` for all else.

    The shared plan cache is asked by device, dtypes, shapes, strides, formats and alpha. A new B or
    S makes a new plan, which finds its kernels compiled unless it chooses others.

    Args:
        x: ``[B, S, K]``, BF16, or codes of ``x_format``.
        w: ``[N, K]`` codes.
        w_sf: scale blob of w.
        w_format: ``mxfp4``, ``nvfp4`` or ``mxfp8``.
        x_sf: scale blob of x's rows, with ``x_format``.
        x_format: None for BF16.
        alpha: factor of the sums.
        current_stream: stream to launch on; None for torch's current stream of x's device.

    Returns:
        ``[B, S, N]``, BF16, contiguous, new, allocated on the stream of the launch.

    Under ``torch.compile`` the op ``torch.ops.cudnn_blocks.dequant_gemm`` stands for the call.
    """
    if is_eager(x):
        return _run(x, w, w_sf, w_format, x_sf, x_format, alpha, current_stream)
    check_traceable(_OP_NAME, "x", x, current_stream)
    y: torch.Tensor = _OVERLOAD(x, w, w_sf, w_format, x_sf, x_format, alpha)
    return y


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    w_sf: torch.Tensor,
    w_format: str,
    x_sf: torch.Tensor | None = None,
    x_format: str | None = None,
    alpha: float = 1.0,
    current_stream: StreamLike | None = None,
) -> torch.Tensor:
    for name, tensor in (("x", x), ("w", w), ("w_sf", w_sf)):
        require_type(name, tensor, torch.Tensor)
    given = (x, w, w_sf, x_sf)
    key: Hashable = (DequantGemm, x.get_device(), *map(_look_at, given), w_format, x_format, alpha)

    def build() -> DequantGemm:
        shape = (*x.shape[:-1], w.shape[0]) if w.dim() else tuple(x.shape)
        y = TensorSpec.contiguous(shape, _VALUES, x.device)
        options = {"w_format": w_format, "x_format": x_format, "alpha": alpha}
        plan = DequantGemm(x, w, w_sf, y, sample_x_sf=x_sf, **options)  # type: ignore[arg-type]
        plan.compile()
        return plan

    plan: DequantGemm = PLANS.get(key, build)
    workspace_bytes = plan.get_workspace_size()

    def launch(stream: StreamLike | None) -> list[torch.Tensor]:
        y = _fake(x, w)
        workspace = torch.empty(workspace_bytes, dtype=_BYTES, device=x.device)
        plan.execute(x, w, w_sf, y, workspace, x_sf, stream)
        return [y]

    return run_on_stream(x, current_stream, launch)[0]


def _look_at(tensor: torch.Tensor | None) -> Hashable:
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride())


def _fake(x: torch.Tensor, w: torch.Tensor, *rest: object, **named: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=_VALUES)


_OVERLOAD = register(
    f"{_OP_NAME}(Tensor x, Tensor w, Tensor w_sf, str w_format, Tensor? x_sf=None, "
    "str? x_format=None, float alpha=1.0) -> Tensor",
    _run,
    _fake,
)
