# SPDX-License-Identifier: Apache-2.0
"""CausalConv1dUpdate: the causal conv1d decode update as a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cudnn_blocks.api_base import APIBase, Sample, require_type
from cudnn_blocks.errors import BadSlotError, ContractError, NotServedError
from cudnn_blocks.geometry import CausalConv1dGeometry
from cudnn_blocks.operands import (
    ACTIVATION_DTYPES,
    Contiguous,
    Extents,
    Operand,
    OperandTable,
    RowPitch,
    StateLayout,
    check_activation_dtype,
)
from cudnn_blocks.reference.causal_conv1d import list_faults
from cudnn_blocks.stages.conv1d import stage as conv1d
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

_ACTIVATIONS = {
    None: conv1d.IDENTITY,
    "identity": conv1d.IDENTITY,
    "silu": conv1d.SILU,
    "swish": conv1d.SILU,
}
_ON_BAD_INDEX = (conv1d.TRAP, conv1d.REPORT)
_PITCH_MULTIPLE = 8
_ELEMENT_BYTES = 2


class CausalConv1dUpdate(APIBase):
    """One decode step of a depthwise causal convolution with a mutable cache.

    For row ``n``, channel ``d`` and slot ``s`` (``n``, or ``conv_state_indices[n]``)::

        history             = concat(conv_state[s, d, :], x[n, d])
        conv_state[s, d, :] = history[-L:]
        out[n, d]           = activation(sum_j history[-W + j] * weight[d, j] + bias[d])

    Rounding: FP32 fused multiply-adds, taps in ascending order, then the bias; SiLU is
    ``v / (1 + exp(-v))`` in FP32; one rounding to the dtype of ``out``. States move bitwise, NaN
    payloads included. SiLU is finite for every finite accumulator; ``+inf`` gives ``+inf``,
    ``-inf`` and NaN give NaN, as the formula does.

    Args:
        sample_x: ``[N, D]`` BF16 or FP16, strides ``(D, 1)``, or ``(ld, 1)`` with ``ld > D`` and
            ``ld % 8 == 0``; 16-byte aligned. N is dynamic, 0 up to the sample's; D is compiled in.
        sample_conv_state: ``[S, D, L]``, dtype of x, contiguous; for ``L == 3`` also strides
            ``(3 * D, 1, D)``; 16-byte aligned. S is dynamic, up to the sample's. Without indices
            ``S >= N``.
        sample_weight: ``[D, W]``, dtype of x, contiguous, 16-byte aligned. W is 2, 3 or 4 and L is
            ``W - 1`` or ``W``.
        sample_out: ``[N, D]``, dtype of x, contiguous, 16-byte aligned.
        geometry: channels D, width W and state length L.
        sample_bias: ``[D]``, dtype of x, contiguous, 16-byte aligned, or None.
        sample_conv_state_indices: int32 ``[N]``, contiguous, 4-byte aligned, or None. -1 is a
            padding row: its output is zero and no state is touched. Other slots have to be unique
            and in range; N may exceed S then.
        activation: None or ``"identity"``; ``"silu"`` or ``"swish"``.
        on_bad_index: what a slot below -1, out of range or used twice does. ``"trap"``: the kernel
            traps, a sticky asynchronous CUDA error; the update is not transactional. On the CPU
            BadSlotError is raised and nothing is written. ``"report"``: every bad row, and every
            row of a group that shares a slot, is skipped, its output zeroed and its fault written
            to ``status``.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins.

    ``execute`` takes ``status`` last: int32 ``[N, 2]`` (declared by ``on_bad_index="report"``),
    zeroed by the caller. A bad row ``n`` gets ``(fault, slot)``, faults 1 below -1, 2 out of range,
    3 duplicate; other rows are left alone, so that many launches may share one tensor.
    ``check_status`` reads it.

    Workspace: none (``get_workspace_size() == 0``).
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``; addresses are captured, contents (indices too) are read
    at replay.
    Mutates: conv_state, out, status.

    Raises:
        ContractError: a tensor breaks the contract, or written memory overlaps another operand.
        NotServedError: 3-D x, a width or state length without a row; the message lists the rows.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> geometry = CausalConv1dGeometry(channels=8192)
        >>> plan = CausalConv1dUpdate(x, conv_state, weight, out, geometry)
        >>> plan.compile()
        >>> plan.execute(x, conv_state, weight, out)

    Source: behaviour after FLA 0.5.2 ``ShortConvolution.step`` (MIT), Dao-AILab/causal-conv1d
    (BSD-3-Clause) and ``cudnn.ops.causal_conv1d_update``; no code taken.
    """

    op_name = "causal-conv1d-update"

    def __init__(
        self,
        sample_x: Sample,
        sample_conv_state: Sample,
        sample_weight: Sample,
        sample_out: Sample,
        geometry: CausalConv1dGeometry,
        *,
        sample_bias: Sample | None = None,
        sample_conv_state_indices: Sample | None = None,
        activation: str | None = None,
        on_bad_index: str = conv1d.TRAP,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        require_type("geometry", geometry, CausalConv1dGeometry)
        samples = {
            "x": sample_x,
            "conv_state": sample_conv_state,
            "weight": sample_weight,
            "out": sample_out,
            "bias": sample_bias,
            "conv_state_indices": sample_conv_state_indices,
        }
        super().__init__(samples, geometry, target=target, engines=engines)
        self._activation = activation
        self._on_bad_index = on_bad_index
        self._has_bias = sample_bias is not None
        self._has_indices = sample_conv_state_indices is not None
        self._has_status = self._has_indices and on_bad_index == conv1d.REPORT
        self._row_bytes = geometry.channels * _ELEMENT_BYTES
        self._slot_bytes = self._row_bytes * geometry.state_len
        self._weight_bytes = self._row_bytes * geometry.width

    def execute(
        self,
        x: torch.Tensor,
        conv_state: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        conv_state_indices: torch.Tensor | None = None,
        current_stream: StreamLike | None = None,
        status: torch.Tensor | None = None,
    ) -> None:
        """One decode step; see the class for every operand."""
        self._launch((x, conv_state, weight, out, bias, conv_state_indices, status), current_stream)

    def _build_operands(self) -> OperandTable:
        _require_one_of("activation", self._activation, tuple(_ACTIVATIONS))
        _require_one_of("on_bad_index", self._on_bad_index, _ON_BAD_INDEX)
        specs, geometry = self._specs, self.geometry
        x, state = specs["x"], specs["conv_state"]
        check_activation_dtype("x", x.dtype)
        if len(x.shape) == 3:
            raise NotServedError(conv1d.CausalConv1dUpdateStage.name, "3-D x [N, D, T]", "x [N, D]")
        channels, width, state_len = geometry.channels, geometry.width, geometry.state_len
        layout = self._state_layout(state)
        state_stride = {
            conv1d.COMPACT: (channels * state_len, state_len, 1),
            conv1d.CHANNEL_LAST: (channels * state_len, 1, channels),
        }[layout]
        dtype, int32 = x.dtype, torch.int32
        vector, matrix = Contiguous(), RowPitch(_PITCH_MULTIPLE)
        return OperandTable(
            (
                Operand("x", dtype, ("N", channels), matrix),
                Operand(
                    "conv_state",
                    dtype,
                    ("S", channels, state_len),
                    StateLayout(state_stride),
                    is_mutated=True,
                ),
                Operand("weight", dtype, (channels, width), vector),
                Operand("out", dtype, ("N", channels), vector, is_mutated=True),
                Operand("bias", dtype, (channels,), vector, is_declared=self._has_bias),
                Operand(
                    "conv_state_indices",
                    int32,
                    ("N",),
                    vector,
                    alignment_bytes=4,
                    is_declared=self._has_indices,
                ),
                Operand(
                    "status",
                    int32,
                    ("N", 2),
                    vector,
                    alignment_bytes=4,
                    is_mutated=True,
                    is_declared=self._has_status,
                    has_sample=False,
                ),
            )
        )

    def _build_stages(
        self, target: Target, engines: Mapping[str, str]
    ) -> tuple[conv1d.CausalConv1dUpdateStage, ...]:
        modes = conv1d.CausalConv1dUpdateModes(
            dtype=ACTIVATION_DTYPES[self._specs["x"].dtype],
            state_layout=self._state_layout(self._specs["conv_state"]),
            activation=_ACTIVATIONS[self._activation],
            has_bias=self._has_bias,
            has_indices=self._has_indices,
            bad_index=self._on_bad_index,
        )
        name = conv1d.CausalConv1dUpdateStage.name
        stage = conv1d.CausalConv1dUpdateStage(self.geometry, modes, target, engines.get(name))
        return (stage,)

    def _check_extents(self, extents: Extents) -> None:
        if not self._has_indices and extents["S"] < extents["N"]:
            raise ContractError(
                "conv_state",
                f"at least N = {extents['N']} slots without conv_state_indices",
                f"{extents['S']} slots",
            )

    def _is_empty(self, extents: Extents) -> bool:
        return extents["N"] == 0

    def _is_plainly_good(self, operands: Sequence[Any]) -> bool:
        x, state, weight, out, bias, indices, status = operands
        if (
            (bias is None) is self._has_bias
            or (indices is None) is self._has_indices
            or (status is None) is self._has_status
        ):
            return False
        num_rows, num_slots = x.shape[0], state.shape[0]
        limits = self._limits
        if not 0 < num_rows <= limits["N"] or num_slots > limits["S"]:
            return False
        if indices is None and num_slots < num_rows:
            return False
        row_bytes = self._row_bytes
        state_low, out_low = state.data_ptr(), out.data_ptr()
        state_high = state_low + num_slots * self._slot_bytes
        out_high = out_low + num_rows * row_bytes
        if state_low < out_high and out_low < state_high:
            return False
        x_low = x.data_ptr()
        x_high = x_low + (num_rows - 1) * x.stride(0) * _ELEMENT_BYTES + row_bytes
        weight_low = weight.data_ptr()
        weight_high = weight_low + self._weight_bytes
        if (
            (x_low < out_high and out_low < x_high)
            or (x_low < state_high and state_low < x_high)
            or (weight_low < out_high and out_low < weight_high)
            or (weight_low < state_high and state_low < weight_high)
        ):
            return False
        return bias is indices is None or self._operands.is_disjoint(operands)

    def _state_layout(self, state: TensorSpec) -> str:
        """Channel-last is a hand-off layout of L = 3; anything else has to be compact."""
        if self.geometry.state_len != 3 or self.geometry.channels == 1 or len(state.shape) != 3:
            return conv1d.COMPACT
        return conv1d.CHANNEL_LAST if state.stride[1] == 1 else conv1d.COMPACT


def _require_one_of(name: str, value: object, served: tuple[object, ...]) -> None:
    if value not in served:
        raise ContractError(name, f"one of {', '.join(map(repr, served))}", repr(value))


def check_status(status: torch.Tensor) -> None:
    """Synchronises and raises BadSlotError, naming rows and slots, if ``status`` holds a fault.

    Args:
        status: int32 ``[N, 2]`` that ``execute`` of a plan with ``on_bad_index="report"`` was
            given. It is left as it is: zero it before it is used again.
    """
    require_type("status", status, torch.Tensor)
    if status.dtype != torch.int32 or status.dim() != 2 or status.shape[1] != 2:
        got = f"{status.dtype} {list(status.shape)}"
        raise ContractError("status", "int32 [N, 2]", got)
    faults = list_faults(status)
    if faults:
        raise BadSlotError(faults)
