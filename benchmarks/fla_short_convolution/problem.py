# SPDX-License-Identifier: Apache-2.0
"""A decode step over the short convolutions of Qwen3-Next's 36 linear-attention layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Buffers = dict[str, Any]
DTYPE = torch.bfloat16
LAYERS, CHANNELS, WIDTH = 36, 8192, 4
"""Layers, and channels of Q, K and V of one layer in one convolution."""


@dataclass(frozen=True)
class DecodeProblem:
    """One token for every sequence; every layer has its weights, cache and input."""

    rows: int
    layers: int = LAYERS
    channels: int = CHANNELS

    name = "decode"
    flops = None

    @property
    def shape(self) -> str:
        """The last word of a row."""
        return f"{self.layers}x-N{self.rows}-D{self.channels}"

    @property
    def traffic_bytes(self) -> int:
        """Inputs and outputs, caches read and written, weights read."""
        elements = self.rows * self.channels * (2 + 2 * WIDTH) + self.channels * WIDTH
        return self.layers * DTYPE.itemsize * elements

    def make_set(self, device: str) -> Buffers:
        """The modules in evaluation mode, a cache each, and inputs."""
        from fla.modules.causal_conv1d import ShortConvolution

        with torch.device(device):
            convs = nn.ModuleList(
                ShortConvolution(self.channels, WIDTH, activation="silu", dtype=DTYPE)
                for _ in range(self.layers)
            )
            caches, inputs = (
                [torch.randn(*shape, dtype=DTYPE) for _ in convs]
                for shape in ((self.rows, self.channels, WIDTH), (self.rows, 1, self.channels))
            )
        for parameter in convs.parameters():
            parameter.requires_grad_(False)
        return {"convs": convs.eval(), "caches": caches, "inputs": inputs}


def expected(buffers: Buffers) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and caches after the step, in FP32 before the last rounding."""
    outputs, caches = [], []
    for conv, cache, x in zip(*(buffers[k] for k in ("convs", "caches", "inputs")), strict=True):
        history = torch.cat([cache[..., 1:], x.transpose(1, 2)], dim=-1)
        y = (history.float() * conv.weight.float().squeeze(1)).sum(-1)
        outputs.append(F.silu(y)[:, None].to(DTYPE))
        caches.append(history)
    return outputs, caches
