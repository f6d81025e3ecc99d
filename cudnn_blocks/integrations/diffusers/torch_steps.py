# SPDX-License-Identifier: Apache-2.0
"""Steps that stay on torch, on views of the same channels-last tensors: no layout is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from cudnn_blocks.integrations.diffusers.conv_steps import ncthw, nthwc
from cudnn_blocks.integrations.diffusers.family import Family
from cudnn_blocks.integrations.diffusers.flow import Flow, take
from cudnn_blocks.integrations.patching import TORCH, LayerRow

MAX_LOGITS = 2**26
"""At a time: 256 MiB in FP32, and as much for their softmax."""


class TorchStep:
    """A step with one row.

    Args:
        name: its path in the model.
    """

    runs: str
    reason: str

    def __init__(self, name: str) -> None:
        self.name = name

    def rows(self, family: Family) -> list[LayerRow]:
        """The same on every target."""
        return [LayerRow(self.name, self.runs, TORCH, self.reason)]


class SkipConv(TorchStep):
    """A block's 1x1x1 convolution of what it adds at its end: a product of matrices."""

    runs = "linear"
    reason = "a 1x1x1 filter"

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name)
        self._weight = module.weight.detach().flatten(1).contiguous()
        self._bias = module.bias.detach()

    def __call__(self, flow: Flow) -> None:
        """Replaces ``skip``; its bias is left to the convolution that adds it."""
        flow.skip = functional.linear(take(flow, "skip"), self._weight)
        flow.skip_bias = self._bias


class Attention(TorchStep):
    """Attention over the pixels of a frame, with one head of all channels.

    No fused kernel of torch is made for heads this wide, so the products of matrices run one by
    one, a few frames at a time; frames of too many logits take the model's own block, on a view.
    """

    runs = "linear, bmm, softmax"
    reason = "one head of all channels"

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name)
        self._module = module
        self._qkv, self._projection = (
            (conv.weight.detach().flatten(1), conv.bias.detach())
            for conv in (module.to_qkv, module.proj)
        )

    def __call__(self, flow: Flow) -> None:
        """Takes ``wide``; leaves ``raw``."""
        value = take(flow, "wide")[:, :, :-1, :-1].contiguous()
        frames = value.flatten(0, 1)
        at_a_time = MAX_LOGITS // (frames.shape[1] * frames.shape[2]) ** 2
        if at_a_time:
            parts = [self._attend(part) for part in frames.split(at_a_time)]
            flow.raw = value + (parts[0] if len(parts) == 1 else torch.cat(parts)).view_as(value)
        else:
            flow.raw = nthwc(self._module(ncthw(value))).contiguous()

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        """Of frames ``[N, H, W, C]``; logits and softmax are FP32, as in a fused kernel."""
        x = self._module.norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)
        q, k, v = functional.linear(x, *self._qkv).chunk(3, dim=-1)
        scale = float(q.shape[-1]) ** -0.5
        weights = _product(q * scale, k.transpose(1, 2)).softmax(dim=-1).to(v.dtype)
        return functional.linear(torch.bmm(weights, v), *self._projection)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """FP32; GPUs multiply BF16 into it directly, a CPU and a fake tensor need not."""
    if a.is_cuda and type(a) is torch.Tensor:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


class AddShortcut(TorchStep):
    """The end of a block that keeps its size."""

    runs = "add"
    reason = "a second sum before the next norm"

    def __call__(self, flow: Flow) -> None:
        """Takes ``wide`` and ``shortcut``; leaves ``raw``."""
        flow.raw = (take(flow, "wide")[:, :, :-1, :-1] + take(flow, "shortcut")).contiguous()


class KeepShortcut(TorchStep):
    """Remembers what came into an up block, which adds it, repeated, at its end."""

    def __init__(self) -> None:
        super().__init__("")

    def rows(self, family: Family) -> list[LayerRow]:
        """None: nothing runs."""
        return []

    def __call__(self, flow: Flow) -> None:
        """Reads ``skip``; leaves ``shortcut``."""
        flow.shortcut = flow.skip
