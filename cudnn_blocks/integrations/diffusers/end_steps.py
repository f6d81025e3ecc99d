# SPDX-License-Identifier: Apache-2.0
"""The first and the last convolution: from the model's layout to ours and back."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from cudnn_blocks import ops
from cudnn_blocks.geometry.conv3d import MAX_HISTORY_FRAMES, CausalConv3dGeometry
from cudnn_blocks.integrations.diffusers.conv_steps import TORCH_CONV, Conv, ncthw, nthwc
from cudnn_blocks.integrations.diffusers.family import Family, causal_outputs
from cudnn_blocks.integrations.diffusers.flow import Flow, take
from cudnn_blocks.integrations.diffusers.weights import Weights
from cudnn_blocks.integrations.patching import TORCH, LayerRow


class Enter:
    """The first convolution, on a chunk ``[N, C, T, H, W]``.

    Args:
        name: its path in the model.
        module: the layer.
        family: on the model's device.
        weights: packs its weight.
    """

    def __init__(self, name: str, module: Any, family: Family, weights: Weights) -> None:
        self.name = name
        self._channels = (module.in_channels, module.out_channels)
        self.is_served = family.causal_conv(*self._channels).engine is not None
        self.weight = (
            ops.pack_causal_conv3d_weight(module.weight.detach())  # small enough to be held twice
            if self.is_served
            else weights.channels_last(module)
        )
        self.bias = module.bias.detach()

    def rows(self, family: Family) -> list[LayerRow]:
        """One."""
        service = family.causal_conv(*self._channels)
        if service.engine is None:
            return [LayerRow(self.name, TORCH_CONV, TORCH, service.reason)]
        return [LayerRow(self.name, service.op, service.engine)]

    def __call__(self, flow: Flow) -> None:
        """Takes ``x``; leaves ``raw`` and its bias."""
        x, previous = take(flow, "x"), flow.caches.previous()
        run = self._on_family if self.is_served else self._on_torch
        flow.raw, cache = run(flow, x, previous)
        flow.raw_bias = self.bias
        flow.caches.keep(cache)

    def _on_family(
        self, flow: Flow, x: torch.Tensor, previous: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        history_frames = flow.caches.history_frames
        results = flow.family.run(
            ops.CausalConv3dWithCache,
            {"input": x, "packed_weight": self.weight, "previous": previous},
            lambda: causal_outputs(CausalConv3dGeometry(), x.shape, history_frames),
        )
        return results["output"], results["cache_output"]

    def _on_torch(
        self, flow: Flow, x: torch.Tensor, previous: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        frames = nthwc(x) if previous is None else torch.cat([previous, nthwc(x)], dim=1)
        missing = flow.caches.zero_leading_frames
        padded = functional.pad(frames, (0, 0, 1, 1, 1, 1, missing, 0)).contiguous()
        raw = nthwc(functional.conv3d(ncthw(padded), self.weight)).contiguous()
        return raw, frames[:, -MAX_HISTORY_FRAMES:].clone(memory_format=torch.contiguous_format)


class Leave:
    """The last convolution; its result is in the model's own layout.

    Args:
        conv: the convolution.
    """

    def __init__(self, conv: Conv) -> None:
        self.conv = conv

    def rows(self, family: Family) -> list[LayerRow]:
        """One."""
        return [self.conv.row(self.conv.service(family))]

    def __call__(self, flow: Flow) -> None:
        """Takes ``padded``; leaves ``x`` ``[N, C, T, H, W]``."""
        flow.skip = None
        # Not contiguous(): of one site it keeps strides by which the model's cat chooses its order.
        x = ncthw(self.conv.raw(flow).add_(self.conv.bias))
        flow.x = x.clone(memory_format=torch.contiguous_format)
