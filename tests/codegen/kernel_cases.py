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

DEFAULT_TARGETS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
"""One per generation; ``--all-targets`` adds the other six."""


@dataclass(frozen=True)
class KernelCase:
    """One specialisation: a checked stage for a target, without a GPU."""

    name: str
    stage: Callable[[str], Stage]


def conv1d_cases() -> list[KernelCase]:
    forms, indices = range(len(STATE_FORMS)), range(3)
    cases = [
        _conv1d_case(8192, form, index, bits)
        for form, index, bits in itertools.product(forms, indices, range(8))
    ]
    # Channel counts that vectorise less, and tails of the last CTA; knobs vary from cell to cell.
    cases += [
        _conv1d_case(channels, form, index, (0b000, 0b011, 0b101, 0b110)[(form + index) % 4])
        for channels, form, index in itertools.product((521, 5, 12, 65537), forms, indices)
    ]
    return cases


def _conv1d_case(channels: int, form: int, indices: int, bits: int) -> KernelCase:
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

    return KernelCase(" ".join(parts), stage)


FAMILIES: dict[str, Callable[[], list[KernelCase]]] = {"conv1d": conv1d_cases}


def select(all_targets: bool) -> list[tuple[KernelCase, str]]:
    """Every case on every target of a run."""
    cases = [case for family in FAMILIES.values() for case in family()]
    return list(itertools.product(cases, GPU_TARGET_NAMES if all_targets else DEFAULT_TARGETS))
