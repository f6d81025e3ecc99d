# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ``fla.modules.causal_conv1d.ShortConvolution``, which needs Triton and a GPU.

It has the constructor, the parameters, ``forward``'s choice between prefill and ``step``, and the
signatures of fla-core 0.6.0; its arithmetic is plain torch in FP32.
tests/gpu/conv1d/test_fla_adapter.py runs the real one.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

MODULE = "fla.modules.causal_conv1d"


class ShortConvolution(nn.Conv1d):
    def __init__(self, hidden_size, kernel_size, bias=False, activation="silu", dtype=None):
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            padding=kernel_size - 1,
            groups=hidden_size,
            bias=bias,
            dtype=dtype,
        )
        self.hidden_size = hidden_size
        self.activation = activation
        self.backend = "triton"
        self.original_steps = 0

    def forward(self, x, residual=None, mask=None, cache=None, output_final_state=False,
                cu_seqlens=None, **kwargs):  # fmt: skip
        batch, tokens, _ = x.shape
        sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
        if not torch.is_grad_enabled() and batch * tokens == sequences:
            y, cache = self.step(
                x=x,
                residual=residual,
                cache=cache,
                output_final_state=output_final_state,
                cu_seqlens=cu_seqlens,
            )
            return y, cache
        width = self.kernel_size[0]
        history = F.pad(x.transpose(1, 2), (width - 1, 0))
        y = F.conv1d(history, self.weight, self.bias, groups=self.hidden_size).transpose(1, 2)
        y = y if self.activation is None else F.silu(y)
        return y, history[..., -width:].contiguous() if output_final_state else None

    def step(self, x, residual, cache, output_final_state=False, cu_seqlens=None):
        self.original_steps += 1
        rows = x.reshape(-1, self.hidden_size)
        if cache is None:
            cache = x.new_zeros(len(rows), self.hidden_size, self.kernel_size[0])
        history = torch.cat([cache[: len(rows), :, 1:], rows.unsqueeze(-1)], dim=-1)
        y = (history.float() * self.weight.squeeze(1).float()).sum(-1)
        y = y if self.bias is None else y + self.bias.float()
        y = y if self.activation is None else F.silu(y)
        y = y.view(x.shape) if residual is None else y.view(x.shape) + residual.float()
        cache[: len(rows)].copy_(history)
        return y.to(x.dtype), (cache if output_final_state else None)


class Layers(nn.Module):
    """Several short convolutions, as a model has them."""

    def __init__(self, count=2, channels=24, width=4, dtype=torch.bfloat16, **kwargs):
        super().__init__()
        kwargs = {"dtype": dtype, **kwargs}
        self.convs = nn.ModuleList(
            ShortConvolution(channels, width, **kwargs) for _ in range(count)
        )
        self.eval()

    def forward(self, x, caches, **kwargs):
        for conv, cache in zip(self.convs, caches, strict=True):
            x, _ = conv(x, cache=cache, output_final_state=True, **kwargs)
        return x


def install(monkeypatch) -> None:
    """Makes ``from fla.modules.causal_conv1d import ShortConvolution`` find the stand-in."""
    module = ModuleType(MODULE)
    module.ShortConvolution = ShortConvolution
    monkeypatch.setitem(sys.modules, MODULE, module)
