# SPDX-License-Identifier: Apache-2.0
"""Operands of one causal conv1d update, the plan for them, and what has to come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cudnn_blocks import CausalConv1dGeometry, CausalConv1dUpdate
from cudnn_blocks.reference import causal_conv1d as reference
from tests.helpers.tensors import assert_same_bits, clone_exact

STATE_FORMS = (
    (2, 1, "compact"),
    (2, 2, "compact"),
    (3, 2, "compact"),
    (3, 3, "compact"),
    (3, 3, "channel_last"),
    (4, 3, "compact"),
    (4, 3, "channel_last"),
    (4, 4, "compact"),
)
"""Every width, state length and state layout that is served."""

FLUSH_BELOW = 2.0**-120
"""Smaller results may be flushed to zero by an engine; the contract leaves that open."""


@dataclass(frozen=True)
class ConvProblem:
    """Operands in one place; ``clone()`` before a run that is to be repeated."""

    x: torch.Tensor
    conv_state: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    status: torch.Tensor | None = None
    activation: str | None = None
    on_bad_index: str = "trap"

    @property
    def geometry(self) -> CausalConv1dGeometry:
        channels, width = self.weight.shape
        return CausalConv1dGeometry(channels, width, self.conv_state.shape[2])

    @property
    def operands(self) -> dict[str, torch.Tensor | None]:
        return {
            "x": self.x,
            "conv_state": self.conv_state,
            "weight": self.weight,
            "out": self.out,
            "bias": self.bias,
            "conv_state_indices": self.indices,
            "status": self.status,
        }

    def plan(self, **knobs: Any) -> CausalConv1dUpdate:
        return CausalConv1dUpdate(
            self.x,
            self.conv_state,
            self.weight,
            self.out,
            self.geometry,
            sample_bias=self.bias,
            sample_conv_state_indices=self.indices,
            activation=self.activation,
            on_bad_index=self.on_bad_index,
            **knobs,
        )

    def compiled(self, **knobs: Any) -> CausalConv1dUpdate:
        plan = self.plan(**knobs)
        plan.compile()
        return plan

    def execute(self, plan: CausalConv1dUpdate, **changes: Any) -> None:
        plan.execute(**{**self.operands, **changes})

    def run(self) -> ConvProblem:
        self.execute(self.compiled())
        return self

    def clone(self) -> ConvProblem:
        copies = {
            name: None if tensor is None else clone_exact(tensor)
            for name, tensor in self.operands.items()
        }
        copies["indices"] = copies.pop("conv_state_indices")
        return replace(self, **copies)

    def with_(self, **changes: Any) -> ConvProblem:
        return replace(self, **changes)


def make_problem(
    num_rows: int,
    channels: int,
    width: int = 4,
    state_len: int = 4,
    layout: str = "compact",
    *,
    num_slots: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    pitch: int | None = None,
    has_bias: bool = False,
    indices: Sequence[int] | str | None = None,
    activation: str | None = None,
    on_bad_index: str = "trap",
) -> ConvProblem:
    """Random operands; ``indices`` a list, ``"shuffled"`` or None; outputs poisoned with NaN."""
    if num_slots is None:
        num_slots = max(num_rows, 1) if indices is None else num_rows + 3

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x = normal(num_rows, pitch or channels)[:, :channels]
    if layout == "channel_last":
        state = normal(num_slots, state_len, channels).transpose(1, 2)
    else:
        state = normal(num_slots, channels, state_len)
    if indices == "shuffled":
        slots = torch.randperm(num_slots, device=device)[:num_rows].int()
    elif indices is not None:
        slots = torch.tensor(indices, dtype=torch.int32, device=device)
    else:
        slots = None
    has_status = slots is not None and on_bad_index == "report"
    return ConvProblem(
        x=x,
        conv_state=state,
        weight=normal(channels, width),
        out=torch.full((num_rows, channels), float("nan"), dtype=dtype, device=device),
        bias=normal(channels) if has_bias else None,
        indices=slots,
        status=(torch.zeros(num_rows, 2, dtype=torch.int32, device=device) if has_status else None),
        activation=activation,
        on_bad_index=on_bad_index,
    )


@dataclass(frozen=True)
class Expected:
    """The FP32 reference before its rounding, how far another FP32 order may be, and the states."""

    value: torch.Tensor
    slack: torch.Tensor
    conv_state: torch.Tensor
    status: torch.Tensor | None


def expect(problem: ConvProblem) -> Expected:
    """Runs the reference in FP32 up to the last rounding, beside the problem's own tensors."""

    def in_fp32(use_silu: bool, magnitudes: bool = False) -> ConvProblem:
        clone = problem.clone()
        if magnitudes:
            clone = clone.with_(
                x=clone.x.abs(),
                conv_state=clone.conv_state.abs(),
                weight=clone.weight.abs(),
                bias=None if clone.bias is None else clone.bias.abs(),
            )
        out = torch.full_like(clone.out, float("nan"), dtype=torch.float32)
        clone = clone.with_(out=out)
        reference.causal_conv1d_update(*clone.operands.values(), use_silu=use_silu)
        return clone

    use_silu = problem.activation in ("silu", "swish")
    done = in_fp32(use_silu)
    slack = in_fp32(use_silu=False, magnitudes=True).out * 2.0**-21
    if use_silu:
        acc = in_fp32(use_silu=False).out
        slope = torch.sigmoid(acc.double()) * (1 + acc.double().abs())
        # The exponent's argument is rounded in FP32, so the error grows with it.
        slack = slack * slope + done.out.abs().double() * (4 + acc.double().abs()) * 2.0**-22
    slack = slack.double().nan_to_num(0.0, 0.0, 0.0) + FLUSH_BELOW
    return Expected(done.out, slack, done.conv_state, done.status)


def assert_matches(actual: ConvProblem, expected: Expected, what: str = "") -> None:
    """Outputs one rounding away from the FP32 reference; states and status bit for bit."""
    assert_one_rounding(actual.out, expected, what)
    assert_same_bits(actual.conv_state, expected.conv_state, f"{what} conv_state")
    if actual.status is not None:
        assert_same_bits(actual.status, expected.status, f"{what} status")


def assert_one_rounding(out: torch.Tensor, expected: Expected, what: str = "") -> None:
    """Every output is the rounding of some FP32 value within the slack of the reference's."""
    value, dtype = expected.value.double(), out.dtype
    low = (value - expected.slack).to(dtype).float()
    high = (value + expected.slack).to(dtype).float()
    got = out.float()
    good = (got >= low) & (got <= high)
    good |= value.isnan() & got.isnan()
    good |= value.isinf() & (got == expected.value)
    if bool(good.all()):
        return
    wrong = (~good).nonzero()
    n, d = wrong[0].tolist()
    raise AssertionError(
        f"{what} out: {len(wrong)} of {good.numel()} elements are more than one rounding off, the "
        f"first at [{n}, {d}]: {got[n, d].item()} for {expected.value[n, d].item()}, "
        f"{ulp_distance(out, expected.value.to(dtype))[n, d].item()} ulp"
    )


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Representable values of a 16-bit float type between two finite numbers."""

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        pattern = tensor.contiguous().view(torch.int16).int()
        return torch.where(pattern < 0, -(pattern & 0x7FFF), pattern)

    return (ordered(a) - ordered(b)).abs()
