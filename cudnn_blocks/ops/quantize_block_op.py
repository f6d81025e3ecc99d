# SPDX-License-Identifier: Apache-2.0
"""QuantizeBlock and ``ops.quantize_block``: MXFP8, MXFP4 and NVFP4 codes and their scales."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from cudnn_blocks.api_base import Sample, require_type
from cudnn_blocks.errors import ContractError
from cudnn_blocks.operands import Contiguous, Operand, OperandTable
from cudnn_blocks.ops.allocate import run_on_stream
from cudnn_blocks.ops.library import check_traceable, is_eager, register
from cudnn_blocks.ops.quantize_family import QuantizeFamilyOp, block_format, scales_bytes
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.quantize.stage import QuantizeModes, QuantizeStage
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

_OP_NAME = "quantize_block"
_DTYPE = torch.bfloat16
_INT32_BYTES = 4


class QuantizeBlock(QuantizeFamilyOp):
    """Codes of 32 or 16 neighbours under one scale: ``codes = sat(x / s(block))``.

    Rounding: the quotient once, nearest, ties to even, saturating. The scale of a block is, of its
    largest magnitude ``amax``::

        mxfp8    e4m3 codes, 32 a block    s = 2 ** ceil(log2(amax * fp32(1 / 448))), E8M0
        mxfp4    e2m1 codes, 32 a block    s = 2 ** ceil(log2(amax * fp32(1 / 6))), E8M0
        nvfp4    e2m1 codes, 16 a block    s = sat_e4m3(max(amax * fp32(1 / 6), 2 ** -9))

    E8M0 from 2**-127 to 2**127. A block of zeros has codes 0 and the smallest scale; one with a NaN
    has scale NaN and codes 0; an infinity saturates, under a scale of 2**127 or 448.

    Args:
        sample_x: ``[B, S, H, D]`` or rows ``[R, D]``, BF16, 16-byte aligned, innermost stride 1,
            the others multiples of 8. D is a multiple of the block, or with ``along_tokens`` of 8.
        sample_codes: shape and strides as x, in e2m1 of D / 2 bytes: two codes a byte, the even one
            in the low nibble. ``torch.float8_e4m3fn``, ``torch.float4_e2m1fn_x2`` or uint8.
        sample_scales: contiguous bytes, one F8_128x4 array per (b, h) or one for ``[R, D]``; all of
            them are written, padding as 0. ``torch.float8_e8m0fnu``, ``float8_e4m3fn`` or uint8.
        fmt: ``mxfp8``, ``mxfp4`` or ``nvfp4``.
        along_tokens: blocks of S instead of D, as V has them; mxfp8. S may end within a block.
        sample_seq_lens: ``[B]`` int32 with ``along_tokens``: tokens from there on count as 0.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``quantize``.

    B, S and R are dynamic, up to the samples' extents; 0 is an empty result.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: codes, scales.

    Raises:
        ContractError: a tensor breaks the contract, or a written one overlaps another.
        NotServedError: a size or format without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = QuantizeBlock(w, codes, scales, fmt="mxfp4")
        >>> plan.compile()
        >>> plan.execute(w, codes, scales)

    Source: formats after the OCP MX specification 1.0 and NVIDIA's NVFP4; no code taken.
    """

    op_name = "quantize-block"
    values_name = "x"

    def __init__(
        self,
        sample_x: Sample,
        sample_codes: Sample,
        sample_scales: Sample,
        *,
        fmt: str,
        along_tokens: bool = False,
        sample_seq_lens: Sample | None = None,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        require_type("fmt", fmt, str)
        require_type("along_tokens", along_tokens, bool)
        samples = {
            "x": sample_x,
            "codes": sample_codes,
            "scales": sample_scales,
            "seq_lens": sample_seq_lens,
        }
        block = block_format(fmt)
        super().__init__(samples, block, along_tokens, target=target, engines=engines)

    def execute(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        seq_lens: torch.Tensor | None = None,
        current_stream: StreamLike | None = None,
    ) -> None:
        """One pass; see the class for every operand."""
        self._launch((x, codes, scales, seq_lens), current_stream)

    @property
    def _has_seq_lens(self) -> bool:
        return "seq_lens" in self._specs

    def _build_operands(self) -> OperandTable:
        if self._has_seq_lens and not self._along_tokens:
            raise ContractError("seq_lens", "None unless along_tokens", "a tensor")
        seq_lens = Operand(
            "seq_lens",
            torch.int32,
            ("B",),
            Contiguous(),
            alignment_bytes=_INT32_BYTES,
            is_declared=self._has_seq_lens,
        )
        codes, scales = self._codes(is_mutated=True), self._scales(is_mutated=True)
        return OperandTable((self._values(_DTYPE), codes, scales, seq_lens))

    def _build_stages(self, target: Target, engines: Mapping[str, str]) -> tuple[QuantizeStage]:
        assert self._block is not None
        name, geometry = QuantizeStage.name, self.geometry
        modes = QuantizeModes(
            self._block.name,
            geometry.heads,
            geometry.d_head,
            along_tokens=self._along_tokens,
            has_seq_lens=self._has_seq_lens,
        )
        return (QuantizeStage(name, modes, self._max_tokens, target, engines.get(name)),)


def quantize_block(
    x: torch.Tensor,
    fmt: str,
    *,
    along_tokens: bool = False,
    seq_lens: torch.Tensor | None = None,
    current_stream: StreamLike | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales; operands, rounding and errors are :class:`QuantizeBlock`'s.

    The shared plan cache is asked by device, shape and mode; a new shape makes a new plan, which
    finds its kernel compiled unless H or D is new.

    Args:
        x: ``[B, S, H, D]`` or ``[R, D]``, BF16.
        fmt: ``mxfp8``, ``mxfp4`` or ``nvfp4``.
        along_tokens: blocks of S instead of D.
        seq_lens: ``[B]`` int32, with ``along_tokens``.
        current_stream: stream to launch on; None for torch's current stream of x's device.

    Returns:
        Codes, e4m3 or uint8 with two e2m1 codes a byte, and scales ``[bytes]`` in their own dtype;
        contiguous, new, allocated on the stream of the launch.
    """
    if is_eager(x):
        codes, scales = _run(x, fmt, along_tokens, seq_lens, current_stream)
    else:
        check_traceable(_OP_NAME, "x", x, current_stream)
        codes, scales = _OVERLOAD(x, fmt, along_tokens, seq_lens)
    return codes, scales


def _run(
    x: torch.Tensor,
    fmt: str,
    along_tokens: bool = False,
    seq_lens: torch.Tensor | None = None,
    current_stream: StreamLike | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    require_type("x", x, torch.Tensor)
    require_type("fmt", fmt, str)
    if seq_lens is not None:
        require_type("seq_lens", seq_lens, torch.Tensor)
    mode = (fmt, along_tokens, seq_lens is None)
    key: Hashable = (QuantizeBlock, x.get_device(), x.dtype, x.shape, mode)

    def build() -> QuantizeBlock:
        samples = [
            TensorSpec.contiguous(shape, dtype, x.device)
            for shape, dtype in _results(x, fmt, along_tokens)
        ]
        plan = QuantizeBlock(
            x, *samples, fmt=fmt, along_tokens=along_tokens, sample_seq_lens=seq_lens
        )
        plan.compile()
        return plan

    plan: QuantizeBlock = PLANS.get(key, build)

    def launch(stream: StreamLike | None) -> list[torch.Tensor]:
        codes, scales = _fake(x, fmt, along_tokens)
        plan.execute(x, codes, scales, seq_lens, stream)
        return [codes, scales]

    codes, scales = run_on_stream(x, current_stream, launch)
    return codes, scales


def _results(
    x: torch.Tensor, fmt: str, along_tokens: bool
) -> tuple[tuple[tuple[int, ...], torch.dtype], tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of codes and scales; of a shape outside the contract, anything legal."""
    block = block_format(fmt)
    shape = tuple(x.shape) or (0, 0)
    codes = (*shape[:-1], shape[-1] // block.codes_per_byte)
    # Most of torch knows nothing of the packed dtype: not even how to copy it.
    code_dtype = torch.uint8 if block.codes_per_byte == 2 else block.code_dtype
    return (codes, code_dtype), ((scales_bytes(shape, block, along_tokens),), block.scale_dtype)


def _fake(
    x: torch.Tensor,
    fmt: str,
    along_tokens: bool = False,
    seq_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = (
        x.new_empty(shape, dtype=dtype) for shape, dtype in _results(x, fmt, along_tokens)
    )
    return codes, scales


_OVERLOAD = register(
    f"{_OP_NAME}(Tensor x, str fmt, bool along_tokens=False, Tensor? seq_lens=None) "
    "-> (Tensor, Tensor)",
    _run,
    _fake,
)
