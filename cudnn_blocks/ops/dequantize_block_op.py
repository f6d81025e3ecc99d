# SPDX-License-Identifier: Apache-2.0
"""DequantizeBlock and ``ops.dequantize_block``: MXFP8, MXFP4 and NVFP4 codes to BF16."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from cudnn_blocks.api_base import Sample, require_type
from cudnn_blocks.operands import OperandTable
from cudnn_blocks.ops.allocate import run_on_stream
from cudnn_blocks.ops.library import check_traceable, is_eager, register
from cudnn_blocks.ops.quantize_family import QuantizeFamilyOp, block_format
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.quantize.portable_config import DEQUANTIZE_VEC
from cudnn_blocks.stages.quantize.stage import DequantizeStage, QuantizeModes
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

_OP_NAME = "dequantize_block"
_DTYPE = torch.bfloat16


class DequantizeBlock(QuantizeFamilyOp):
    """Codes times the scale of their block: ``y = sat_bf16(code * s(block))``.

    Rounding: none within BF16's range, which holds every such product. Beyond it BF16's largest
    number stands in, below it the nearest subnormal, ties to even. NaN codes and scales give NaN.
    Padding bytes of the scales are not read.

    Args:
        sample_codes: ``[B, S, H, D]`` or rows ``[R, D]``, as :class:`QuantizeBlock` writes them;
            e4m3 strides multiples of 16, those of packed e2m1 of 8.
        sample_scales: as :class:`QuantizeBlock` writes them.
        sample_y: BF16, 16-byte aligned, innermost stride 1, the others multiples of 8 that keep
            all elements apart. D is a multiple of 16, and of the block.
        fmt: ``mxfp8``, ``mxfp4`` or ``nvfp4``.
        along_tokens: blocks of S instead of D; mxfp8.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``dequantize``.

    B, S and R are dynamic, up to the samples' extents; 0 is an empty result.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: y.

    Raises:
        ContractError: a tensor breaks the contract, or y overlaps another operand.
        NotServedError: a size or format without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = DequantizeBlock(codes, scales, y, fmt="nvfp4")
        >>> plan.compile()
        >>> plan.execute(codes, scales, y)

    Source: formats after the OCP MX specification 1.0 and NVIDIA's NVFP4; no code taken.
    """

    op_name = "dequantize-block"
    values_name = "y"

    def __init__(
        self,
        sample_codes: Sample,
        sample_scales: Sample,
        sample_y: Sample,
        *,
        fmt: str,
        along_tokens: bool = False,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        require_type("fmt", fmt, str)
        require_type("along_tokens", along_tokens, bool)
        samples = {"codes": sample_codes, "scales": sample_scales, "y": sample_y}
        block = block_format(fmt)
        super().__init__(samples, block, along_tokens, target=target, engines=engines)

    def execute(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        y: torch.Tensor,
        current_stream: StreamLike | None = None,
    ) -> None:
        """One pass; see the class for every operand."""
        self._launch((codes, scales, y), current_stream)

    def _build_operands(self) -> OperandTable:
        return OperandTable(
            (
                self._codes(vector=DEQUANTIZE_VEC),
                self._scales(),
                self._values(_DTYPE, is_mutated=True),
            )
        )

    def _build_stages(self, target: Target, engines: Mapping[str, str]) -> tuple[DequantizeStage]:
        assert self._block is not None
        name, geometry = DequantizeStage.name, self.geometry
        modes = QuantizeModes(
            self._block.name, geometry.heads, geometry.d_head, along_tokens=self._along_tokens
        )
        return (DequantizeStage(name, modes, self._max_tokens, target, engines.get(name)),)


def dequantize_block(
    codes: torch.Tensor,
    scales: torch.Tensor,
    fmt: str,
    *,
    along_tokens: bool = False,
    current_stream: StreamLike | None = None,
) -> torch.Tensor:
    """Codes to BF16; operands, rounding and errors are :class:`DequantizeBlock`'s.

    The shared plan cache is asked by device, dtypes, shape and mode; a new shape makes a new plan,
    which finds its kernel compiled unless H or D is new.

    Args:
        codes: ``[B, S, H, D]`` or ``[R, D]``, in e2m1 of D / 2 bytes.
        scales: ``[bytes]``.
        fmt: ``mxfp8``, ``mxfp4`` or ``nvfp4``.
        along_tokens: blocks of S instead of D.
        current_stream: stream to launch on; None for torch's current stream of codes' device.

    Returns:
        BF16, contiguous, new, allocated on the stream of the launch.
    """
    if is_eager(codes):
        return _run(codes, scales, fmt, along_tokens, current_stream)
    check_traceable(_OP_NAME, "codes", codes, current_stream)
    y: torch.Tensor = _OVERLOAD(codes, scales, fmt, along_tokens)
    return y


def _run(
    codes: torch.Tensor,
    scales: torch.Tensor,
    fmt: str,
    along_tokens: bool = False,
    current_stream: StreamLike | None = None,
) -> torch.Tensor:
    for name, tensor in (("codes", codes), ("scales", scales)):
        require_type(name, tensor, torch.Tensor)
    require_type("fmt", fmt, str)
    dtypes = (codes.dtype, scales.dtype)
    mode = (fmt, along_tokens)
    key: Hashable = (DequantizeBlock, codes.get_device(), dtypes, codes.shape, mode)

    def build() -> DequantizeBlock:
        y = TensorSpec.contiguous(_fake(codes, scales, fmt).shape, _DTYPE, codes.device)
        plan = DequantizeBlock(codes, scales, y, fmt=fmt, along_tokens=along_tokens)
        plan.compile()
        return plan

    plan: DequantizeBlock = PLANS.get(key, build)

    def launch(stream: StreamLike | None) -> list[torch.Tensor]:
        y = _fake(codes, scales, fmt)
        plan.execute(codes, scales, y, stream)
        return [y]

    return run_on_stream(codes, current_stream, launch)[0]


def _fake(
    codes: torch.Tensor, scales: torch.Tensor, fmt: str, along_tokens: bool = False
) -> torch.Tensor:
    *outer, width = codes.shape or (0,)
    return codes.new_empty((*outer, width * block_format(fmt).codes_per_byte), dtype=_DTYPE)


_OVERLOAD = register(
    f"{_OP_NAME}(Tensor codes, Tensor scales, str fmt, bool along_tokens=False) -> Tensor",
    _run,
    _fake,
)
