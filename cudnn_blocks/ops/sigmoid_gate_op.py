# SPDX-License-Identifier: Apache-2.0
"""SigmoidGate and ``ops.sigmoid_gate``: the gate of an attention output."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import torch

from cudnn_blocks.api_base import Sample, require_type
from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.sigmoid_gate import SigmoidGateGeometry
from cudnn_blocks.operands import (
    ACTIVATION_DTYPES,
    ANY_EXTENT,
    Operand,
    OperandTable,
    check_activation_dtype,
)
from cudnn_blocks.ops.allocate import run_on_stream
from cudnn_blocks.ops.library import check_traceable, is_eager, register
from cudnn_blocks.ops.seen_calls import SeenCallsOp
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.gate.stage import MAX_BATCH_VECS, VEC, SigmoidGateModes, SigmoidGateStage
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.strided import vector_strides
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

_OP_NAME = "sigmoid_gate"


class SigmoidGate(SeenCallsOp):
    """The gate of an attention output: ``out = A(float(o) * sigmoid(float(gate)))``.

    Rounding: FP32, then once (``A``) to the dtype of o. ``sigmoid(x) = 1 / (1 + exp(-x))``, finite
    for every finite x, 0 at -inf, 1 at inf, NaN at NaN. The attention's own gate epilogue gives the
    same bits.

    Operands are ``[B, S, h_q, D]``, BF16 or FP16, all of one dtype, 16-byte aligned, with innermost
    stride 1 and the others multiples of 8. D is a multiple of 8 up to 512. B and S are dynamic, up
    to the samples' extents; 0 is an empty result.

    Args:
        sample_o: attention output.
        sample_gate: such as the gate's column band of a projection slab.
        sample_out: strides that keep all elements apart. ``out`` may be ``o`` itself, but no other
            part of it.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``sigmoid_gate``.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: out.

    Raises:
        ContractError: a tensor breaks the contract, or out overlaps an operand that it is not.
        NotServedError: a size without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = SigmoidGate(o, gate, o)
        >>> plan.compile()
        >>> plan.execute(o, gate, o)

    Source: behaviour after the gated attention block of cudnn-frontend; no code taken.
    """

    op_name = "sigmoid-gate"

    def __init__(
        self,
        sample_o: Sample,
        sample_gate: Sample,
        sample_out: Sample,
        *,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        samples = {"o": sample_o, "gate": sample_gate, "out": sample_out}
        super().__init__(samples, None, target=target, engines=engines)

    def execute(
        self,
        o: torch.Tensor,
        gate: torch.Tensor,
        out: torch.Tensor,
        current_stream: StreamLike | None = None,
    ) -> None:
        """One pass; see the class for every operand."""
        self._launch((o, gate, out), current_stream)

    def _plan(self) -> None:
        shape = self._specs["o"].shape
        if len(shape) != 4:
            raise ContractError("o", "shape [B, S, h_q, D]", list(shape))
        self.geometry = SigmoidGateGeometry(h_q=shape[2], d_head=shape[3])
        super()._plan()

    def _build_operands(self) -> OperandTable:
        dtype = self._specs["o"].dtype
        check_activation_dtype("o", dtype)
        d_head = self.geometry.d_head
        shape = ("B", "S", self.geometry.h_q, d_head)
        read, written = vector_strides(d_head), vector_strides(d_head, is_written=True)
        return OperandTable(
            (
                Operand("o", dtype, shape, read),
                Operand("gate", dtype, shape, read),
                Operand("out", dtype, shape, written, is_mutated=True, may_be="o"),
            )
        )

    def _build_stages(
        self, target: Target, engines: Mapping[str, str]
    ) -> tuple[SigmoidGateStage, ...]:
        geometry = self.geometry
        dtype = ACTIVATION_DTYPES[self._specs["o"].dtype]
        modes = SigmoidGateModes(dtype, geometry.h_q, geometry.d_head)
        engine = engines.get(SigmoidGateStage.name)
        return (SigmoidGateStage(modes, self._limits["S"], target, engine),)


def sigmoid_gate(
    o: torch.Tensor, gate: torch.Tensor, current_stream: StreamLike | None = None
) -> torch.Tensor:
    """The gate of an attention output; operands, rounding and errors are :class:`SigmoidGate`'s.

    The first call of a device, dtype, heads and D plans; every B, S and stride after that finds the
    plan.

    Args:
        o: ``[B, S, h_q, D]``.
        gate: shape of o.
        current_stream: stream to launch on; None for torch's current stream of o's device.

    Returns:
        Shape of o, contiguous, new, allocated on the stream of the launch.
    """
    if is_eager(o):
        return _run(o, gate, current_stream)
    check_traceable(_OP_NAME, "o", o, current_stream)
    out: torch.Tensor = _OVERLOAD(o, gate)
    return out


def _run(
    o: torch.Tensor, gate: torch.Tensor, current_stream: StreamLike | None = None
) -> torch.Tensor:
    for name, tensor in (("o", o), ("gate", gate)):
        require_type(name, tensor, torch.Tensor)
    key: Hashable = (SigmoidGate, o.get_device(), o.dtype, o.shape[2:])

    def build() -> SigmoidGate:
        plan = _build_unbounded(o)
        plan.compile()
        return plan

    plan: SigmoidGate = PLANS.get(key, build)

    def launch(stream: StreamLike | None) -> list[torch.Tensor]:
        out = _fake(o, gate)
        plan.execute(o, gate, out, stream)
        return [out]

    return run_on_stream(o, current_stream, launch)[0]


def _build_unbounded(o: torch.Tensor) -> SigmoidGate:
    """A plan for the largest extents; what is wrong with o, the samples show too."""
    heads = tuple(o.shape[2:])
    token_vecs = -(-heads[0] * heads[1] // VEC) if len(heads) == 2 else 1
    shape = (ANY_EXTENT, MAX_BATCH_VECS // max(token_vecs, 1), *heads)
    sample = TensorSpec.contiguous(shape, o.dtype, o.device)
    return SigmoidGate(sample, sample, sample, target=Target.of_device(o.device))


def _fake(o: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return o.new_empty(o.shape)


_OVERLOAD = register(f"{_OP_NAME}(Tensor o, Tensor gate) -> Tensor", _run, _fake)
