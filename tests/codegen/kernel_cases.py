# SPDX-License-Identifier: Apache-2.0
"""Every specialisation of every kernel, as data. Each op adds a function to ``FAMILIES``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cudnn_blocks import CausalConv1dGeometry, CausalConv1dUpdate, TensorSpec
from cudnn_blocks.stages.stage import Stage
from cudnn_blocks.target import GPU_TARGET_NAMES
from tests.helpers.conv1d_problem import STATE_FORMS

COMPLETE_TARGET = "sm_90a"
"""Compiled in full by default; the others get the covering subset."""
DEFAULT_TARGETS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")


@dataclass(frozen=True)
class KernelCase:
    """One specialisation: a checked stage for a target, without a GPU."""

    name: str
    is_covering: bool
    """Part of the subset that has every value of every knob and every pair of two knobs."""
    stage: Callable[[str], Stage]


def conv1d_cases() -> list[KernelCase]:
    full = itertools.product(range(len(STATE_FORMS)), range(3), range(8))
    cases = [
        _conv1d_case(8192, form, indices, bits, is_covering=bits in _covering(form, indices))
        for form, indices, bits in full
    ]
    # Channel counts that vectorise less, and tails of the last CTA.
    for channels in (521, 5, 12, 65537):
        for form, indices in itertools.product(range(len(STATE_FORMS)), range(3)):
            (bits,) = _covering(form, indices)
            is_covering = channels == 521
            cases.append(_conv1d_case(channels, form, indices, bits, is_covering=is_covering))
    return cases


def _covering(form: int, indices: int) -> tuple[int, ...]:
    """A row of an orthogonal array of three two-valued knobs, another one from cell to cell."""
    return ((0b000, 0b011, 0b101, 0b110)[(form + indices) % 4],)


def _conv1d_case(
    channels: int, form: int, indices: int, bits: int, *, is_covering: bool
) -> KernelCase:
    width, state_len, layout = STATE_FORMS[form]
    dtype = (torch.bfloat16, torch.float16)[bits & 1]
    activation = ("identity", "silu")[bits >> 1 & 1]
    has_bias = bool(bits >> 2)
    on_bad_index = (None, "trap", "report")[indices]
    parts = [
        f"conv1d_update D={channels} W={width} L={state_len} {layout}",
        str(dtype).removeprefix("torch."),
        activation,
        "bias" if has_bias else "no-bias",
        f"indices={on_bad_index}",
    ]

    def spec(*shape: int, of: torch.dtype = dtype) -> TensorSpec:
        return TensorSpec.contiguous(shape, of)

    def stage(target: str) -> Stage:
        state = spec(64, channels, state_len)
        if layout == "channel_last":
            state = TensorSpec(dtype, state.shape, (3 * channels, 1, channels), state.device)
        plan = CausalConv1dUpdate(
            spec(64, channels),
            state,
            spec(channels, width),
            spec(64, channels),
            CausalConv1dGeometry(channels, width, state_len),
            sample_bias=spec(channels) if has_bias else None,
            sample_conv_state_indices=spec(64, of=torch.int32) if on_bad_index else None,
            activation=activation,
            on_bad_index=on_bad_index or "trap",
            target=target,
        )
        plan.check_support()
        return plan._stages[0]

    return KernelCase(" ".join(parts), is_covering, stage)


FAMILIES: dict[str, Callable[[], list[KernelCase]]] = {"conv1d": conv1d_cases}


def select(all_targets: bool) -> list[tuple[KernelCase, str]]:
    """Cases and targets of a run: everything, or what CI has time for."""
    cases = [case for family in FAMILIES.values() for case in family()]
    if all_targets:
        return list(itertools.product(cases, GPU_TARGET_NAMES))
    return [
        (case, target)
        for case, target in itertools.product(cases, DEFAULT_TARGETS)
        if case.is_covering or target == COMPLETE_TARGET
    ]
