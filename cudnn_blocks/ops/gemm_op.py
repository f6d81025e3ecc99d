# SPDX-License-Identifier: Apache-2.0
"""Gemm and ``ops.gemm``: a matrix product of activations and a weight."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import torch

from cudnn_blocks.api_base import Sample, require_type
from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.gemm import GemmGeometry
from cudnn_blocks.operands import ACTIVATION_DTYPES, Operand, OperandTable, check_activation_dtype
from cudnn_blocks.ops.allocate import run_on_stream
from cudnn_blocks.ops.library import check_traceable, is_eager, register
from cudnn_blocks.ops.seen_calls import SeenCallsOp
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.quant_spec import E4M3
from cudnn_blocks.stages.gemm.epilogues import E4M3 as E4M3_NAME
from cudnn_blocks.stages.gemm.stage import GemmModes, GemmStage
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.strided import PitchedRows, Strided, vector_strides
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

_OP_NAME = "gemm"
CODES_VEC = 16
"""Codes of a 16-byte access."""


class Gemm(SeenCallsOp):
    """A matrix product: ``y[b, s, n] = A(sum over k of x[b, s, k] * w[n, k])``.

    Rounding: FP32 accumulation, one rounding to the activation dtype (``A``). The order of a sum
    belongs to the engine; sums that FP32 holds exactly have the same bits everywhere.

    Operands are BF16 or FP16, all of one dtype, 16-byte aligned. B and S are dynamic, up to the
    samples' extents; B = 0 or S = 0 does nothing. Non-finite values stay in their rows and columns.

    x and w may be e4m3 codes instead, of which ``alpha`` makes values: ``y = A(alpha * sum)`` in
    BF16, the product with alpha rounded to FP32. Their pitches and K are multiples of 16.
    docs/gemm.md says how their sums are kept.

    Args:
        sample_x: ``[B, S, K]``; its B * S rows at one pitch, compact or a larger multiple of 8.
        sample_w: ``[N, K]``; innermost stride 1, row pitch a multiple of 8.
        sample_y: ``[B, S, N]``; rows as those of x.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``gemm``. The engine ``cudnn`` takes
            contiguous operands only.
        alpha: factor of the sums of codes, an argument of the kernel; 1.0 for other operands.
        fast_accumulation: of codes, permits sums over all of K at the tensor cores' precision,
            about 14 bits on Hopper: of random data with K = 4096 an element may be off by 2 %.
            Engines whose sums are FP32 as they are keep them. False for other operands.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: y.

    Raises:
        ContractError: a tensor breaks the contract, y overlaps another operand, or an argument has
            no effect on operands that are no codes.
        NotServedError: a size without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = Gemm(x, w, y)
        >>> plan.compile()
        >>> plan.execute(x, w, y)

    Source: behaviour after ``torch.nn.functional.linear``; no code taken.
    """

    op_name = "gemm"

    def __init__(
        self,
        sample_x: Sample,
        sample_w: Sample,
        sample_y: Sample,
        *,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
        alpha: float = 1.0,
        fast_accumulation: bool = False,
    ) -> None:
        require_type("alpha", alpha, float)
        require_type("fast_accumulation", fast_accumulation, bool)
        samples = {"x": sample_x, "w": sample_w, "y": sample_y}
        super().__init__(samples, None, target=target, engines=engines)
        self._alpha = alpha
        self._fast_accumulation = fast_accumulation

    def execute(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        y: torch.Tensor,
        current_stream: StreamLike | None = None,
    ) -> None:
        """One product; see the class for every operand."""
        self._launch((x, w, y), current_stream)

    def _plan(self) -> None:
        self.geometry = self._read_geometry()
        super()._plan()

    def _read_geometry(self) -> GemmGeometry:
        x, w = self._specs["x"], self._specs["w"]
        for name, axes in (("x", "B, S, K"), ("w", "N, K")):
            if len(self._specs[name].shape) != axes.count(",") + 1:
                raise ContractError(name, f"shape [{axes}]", list(self._specs[name].shape))
        return GemmGeometry(n=w.shape[0], k=x.shape[2])

    def _build_operands(self) -> OperandTable:
        n, k, dtype = self.geometry.n, self.geometry.k, self._specs["x"].dtype
        x_rows, w_strides, result = PitchedRows(), vector_strides(k), dtype
        if dtype == E4M3:
            x_rows, result = PitchedRows(CODES_VEC), torch.bfloat16
            w_strides = Strided(math.gcd(CODES_VEC, k))
        else:
            check_activation_dtype("x", dtype)
            only_of_codes = {
                "alpha": (self._alpha, 1.0),
                "fast_accumulation": (self._fast_accumulation, False),
            }
            for name, (value, neutral) in only_of_codes.items():
                if value != neutral:
                    raise ContractError(name, f"{neutral} with {dtype} operands", value)
        return OperandTable(
            (
                Operand("x", dtype, ("B", "S", k), x_rows),
                Operand("w", dtype, (n, k), w_strides),
                Operand("y", result, ("B", "S", n), PitchedRows(), is_mutated=True),
            )
        )

    def _build_stages(self, target: Target, engines: Mapping[str, str]) -> tuple[GemmStage, ...]:
        x = self._specs["x"]
        dtype = E4M3_NAME if x.dtype == E4M3 else ACTIVATION_DTYPES[x.dtype]
        fast = self._fast_accumulation
        modes = GemmModes(self.geometry.n, self.geometry.k, dtype, fast_accumulation=fast)
        rows, name = x.shape[0] * x.shape[1], GemmStage.name
        pin = engines.get(name)
        return (GemmStage(name, modes, rows, target, pin, alpha=self._alpha, device=x.device),)


def gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    current_stream: StreamLike | None = None,
    alpha: float = 1.0,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """``x @ w.T`` with one rounding; operands, rounding and errors are those of :class:`Gemm`.

    The shared plan cache is asked by device, dtype, shapes and keywords. A new B or S makes a new
    plan, which finds its kernel compiled unless it chooses another tile.

    Args:
        x: ``[B, S, K]``, BF16, FP16 or e4m3.
        w: ``[N, K]``.
        current_stream: stream to launch on; None for torch's current stream of x's device.
        alpha: factor of the sums of e4m3 codes.
        fast_accumulation: permits sums of e4m3 codes at the tensor cores' precision.

    Returns:
        ``[B, S, N]``, of x's dtype or BF16 for e4m3, contiguous, new, allocated on the stream of
        the launch.

    Under ``torch.compile`` the op ``torch.ops.cudnn_blocks.gemm`` stands for the call.
    """
    if is_eager(x):
        return _run(x, w, alpha, fast_accumulation, current_stream)
    check_traceable(_OP_NAME, "x", x, current_stream)
    y: torch.Tensor = _OVERLOAD(x, w, alpha, fast_accumulation)
    return y


def _run(
    x: torch.Tensor,
    w: torch.Tensor,
    alpha: float = 1.0,
    fast_accumulation: bool = False,
    current_stream: StreamLike | None = None,
) -> torch.Tensor:
    plan = _find_plan(x, w, alpha, fast_accumulation)

    def launch(stream: StreamLike | None) -> list[torch.Tensor]:
        y = _fake(x, w)
        plan.execute(x, w, y, stream)
        return [y]

    return run_on_stream(x, current_stream, launch)[0]


def _find_plan(x: torch.Tensor, w: torch.Tensor, alpha: float, fast_accumulation: bool) -> Gemm:
    for name, tensor in (("x", x), ("w", w)):
        require_type(name, tensor, torch.Tensor)
    require_type("fast_accumulation", fast_accumulation, bool)  # a key takes 1 for True
    key: Hashable = (Gemm, x.get_device(), x.dtype, x.shape, w.shape, alpha, fast_accumulation)

    def build() -> Gemm:
        shape = (*x.shape[:-1], w.shape[0]) if w.dim() else tuple(x.shape)
        y = TensorSpec.contiguous(shape, _result(x), x.device)
        plan = Gemm(x, w, y, alpha=alpha, fast_accumulation=fast_accumulation)
        plan.compile()
        return plan

    plan: Gemm = PLANS.get(key, build)
    return plan


def _result(x: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if x.dtype == E4M3 else x.dtype


def _fake(
    x: torch.Tensor, w: torch.Tensor, alpha: float = 1.0, fast_accumulation: bool = False
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=_result(x))


_OVERLOAD = register(
    f"{_OP_NAME}(Tensor x, Tensor w, float alpha=1.0, bool fast_accumulation=False) -> Tensor",
    _run,
    _fake,
)
