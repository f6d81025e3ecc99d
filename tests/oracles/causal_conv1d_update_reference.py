# SPDX-License-Identifier: Apache-2.0
"""Oracles of the causal conv1d update that share no code with the package."""

from __future__ import annotations

import math

import torch


def update_by_fp64_loop(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    slots: list[int],
    *,
    use_silu: bool,
) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Plain Python floats, element by element; returns outputs and states."""
    width = weight.shape[1]
    state, taps = conv_state.double().tolist(), weight.double().tolist()
    tokens = x.double().tolist()
    shift = [0.0] * len(taps) if bias is None else bias.double().tolist()
    out = [[0.0] * len(taps) for _ in tokens]
    for n, slot in enumerate(slots):
        if slot == -1:
            continue
        for d in range(len(taps)):
            history = [*state[slot][d], tokens[n][d]]
            state[slot][d] = history[1:]
            acc = shift[d]
            for j in range(width):
                acc += history[len(history) - width + j] * taps[d][j]
            out[n][d] = acc / (1 + math.exp(-acc)) if use_silu else acc
    return out, state


def full_causal_conv(
    tokens: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """All tokens ``[T, N, D]`` at once, from an empty history, in FP64, by torch.nn.functional."""
    channels, width = weight.shape
    padded = torch.nn.functional.pad(tokens.double().permute(1, 2, 0), (width - 1, 0))
    out = torch.nn.functional.conv1d(
        padded,
        weight.double().unsqueeze(1),
        None if bias is None else bias.double(),
        groups=channels,
    )
    return out.permute(2, 0, 1)
