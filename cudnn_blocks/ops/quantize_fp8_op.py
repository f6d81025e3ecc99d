# SPDX-License-Identifier: Apache-2.0
"""QuantizeFp8 and ``ops.quantize_fp8``: per-tensor e4m3 codes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from cudnn_blocks.api_base import Sample, require_type
from cudnn_blocks.operands import ACTIVATION_DTYPES, OperandTable, check_activation_dtype
from cudnn_blocks.ops.allocate import run_on_stream
from cudnn_blocks.ops.library import check_traceable, is_eager, register
from cudnn_blocks.ops.quantize_family import QuantizeFamilyOp
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.quant_spec import E4M3, validate_scale
from cudnn_blocks.stages.quantize.portable_config import FP8
from cudnn_blocks.stages.quantize.stage import QuantizeModes, QuantizeStage
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

_OP_NAME = "quantize_fp8"


class QuantizeFp8(QuantizeFamilyOp):
    """Per-tensor e4m3 codes: ``codes = sat_e4m3(float(x) * scale)``.

    Rounding: the product to FP32, then once to e4m3, nearest, ties to even. Beyond 448 it
    saturates, infinities too; NaN becomes 0x7F. The real value of a code is ``code / scale``.

    Operands are 16-byte aligned, with innermost stride 1 and the others multiples of 8. B, S and R
    are dynamic, up to the samples' extents; 0 is an empty result.

    Args:
        sample_x: ``[B, S, H, D]`` or rows ``[R, D]``, BF16 or FP16; D a multiple of 8.
        sample_codes: shape of x, ``torch.float8_e4m3fn``; strides that keep all elements apart.
        scale: positive, an argument of the kernel; ``plan.scale`` may be set between calls.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``quantize``.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``; a graph keeps the scale of its capture.
    Mutates: codes.

    Raises:
        ContractError: a tensor or the scale breaks the contract, or codes overlaps x.
        NotServedError: a size without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = QuantizeFp8(x, codes, scale=448 / 6.0)
        >>> plan.compile()
        >>> plan.execute(x, codes)

    Source: behaviour after torch's own cast to ``float8_e4m3fn``; no code taken.
    """

    op_name = "quantize-fp8"
    values_name = "x"

    def __init__(
        self,
        sample_x: Sample,
        sample_codes: Sample,
        *,
        scale: float,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        samples = {"x": sample_x, "codes": sample_codes}
        super().__init__(samples, None, False, target=target, engines=engines)
        require_type("scale", scale, float)
        self._stage: QuantizeStage | None = None
        self._scale = scale

    @property
    def scale(self) -> float:
        """What values are multiplied by."""
        return self._scale

    @scale.setter
    def scale(self, scale: float) -> None:
        require_type("scale", scale, float)
        validate_scale("scale", scale)
        self._scale = scale
        if self._stage is not None:
            self._stage.scale = scale

    def execute(
        self, x: torch.Tensor, codes: torch.Tensor, current_stream: StreamLike | None = None
    ) -> None:
        """One pass; see the class for every operand."""
        self._launch((x, codes), current_stream)

    def _build_operands(self) -> OperandTable:
        dtype = self._specs["x"].dtype
        check_activation_dtype("x", dtype)
        validate_scale("scale", self._scale)
        return OperandTable((self._values(dtype), self._codes(is_mutated=True)))

    def _build_stages(self, target: Target, engines: Mapping[str, str]) -> tuple[QuantizeStage]:
        name, geometry = QuantizeStage.name, self.geometry
        dtype = ACTIVATION_DTYPES[self._specs["x"].dtype]
        modes = QuantizeModes(FP8, geometry.heads, geometry.d_head, dtype)
        pin = engines.get(name)
        self._stage = QuantizeStage(name, modes, self._max_tokens, target, pin, scale=self._scale)
        return (self._stage,)


def quantize_fp8(
    x: torch.Tensor, scale: float, *, current_stream: StreamLike | None = None
) -> torch.Tensor:
    """Per-tensor e4m3 codes; operands, rounding and errors are :class:`QuantizeFp8`'s.

    The shared plan cache is asked by device, dtype, shape and scale; a new one of them makes a new
    plan, which finds its kernel compiled unless H or D is new.

    Args:
        x: ``[B, S, H, D]`` or ``[R, D]``, BF16 or FP16.
        scale: what values are multiplied by.
        current_stream: stream to launch on; None for torch's current stream of x's device.

    Returns:
        Shape of x, ``torch.float8_e4m3fn``, contiguous, new, allocated on the stream of the launch.
    """
    if is_eager(x):
        return _run(x, scale, current_stream)
    check_traceable(_OP_NAME, "x", x, current_stream)
    codes: torch.Tensor = _OVERLOAD(x, scale)
    return codes


def _run(x: torch.Tensor, scale: float, current_stream: StreamLike | None = None) -> torch.Tensor:
    require_type("x", x, torch.Tensor)
    require_type("scale", scale, float)
    key: Hashable = (QuantizeFp8, x.get_device(), x.dtype, x.shape, scale)

    def build() -> QuantizeFp8:
        plan = QuantizeFp8(x, TensorSpec.contiguous(x.shape, E4M3, x.device), scale=scale)
        plan.compile()
        return plan

    plan: QuantizeFp8 = PLANS.get(key, build)

    def launch(stream: StreamLike | None) -> list[torch.Tensor]:
        codes = _fake(x, scale)
        plan.execute(x, codes, stream)
        return [codes]

    return run_on_stream(x, current_stream, launch)[0]


def _fake(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=E4M3)


_OVERLOAD = register(f"{_OP_NAME}(Tensor x, float scale) -> Tensor", _run, _fake)
