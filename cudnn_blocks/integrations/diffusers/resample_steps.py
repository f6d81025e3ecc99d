# SPDX-License-Identifier: Apache-2.0
"""Steps between two resolutions: strided and upsampling convolutions, and the shortcuts past them.

They stay on torch, on views of the same channels-last tensors: no layout is copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from cudnn_blocks.geometry.conv3d import MAX_HISTORY_FRAMES
from cudnn_blocks.integrations.diffusers.conv_steps import TORCH_CONV, copy_wide, ncthw, nthwc
from cudnn_blocks.integrations.diffusers.family import Family
from cudnn_blocks.integrations.diffusers.flow import Flow, take
from cudnn_blocks.integrations.diffusers.torch_steps import TorchStep
from cudnn_blocks.integrations.diffusers.weights import Weights
from cudnn_blocks.integrations.patching import TORCH, LayerRow

TORCH_CONV_2D = "conv2d, channels last"


class AvgDown(TorchStep):
    """The mean over frames and pixels that a down block adds at its end, of what came into it."""

    runs = "mean"
    reason = "a mean of pixels"

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name)
        self._module = module
        self._factor_t, self._factor_s = module.factor_t, module.factor_s
        self._is_identity = module.factor == module.group_size == 1
        self._is_spatial = module.group_size == self._factor_s**2

    def __call__(self, flow: Flow) -> None:
        """Reads ``skip``; leaves ``shortcut``."""
        x = flow.skip
        assert x is not None, "no step has left skip"
        if self._is_identity:
            flow.shortcut = x
        elif self._is_spatial:  # a group is the pixels of one frame
            flow.shortcut = self._mean(x)
        else:
            flow.shortcut = nthwc(self._module(ncthw(x))).contiguous()

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        n, t, h, w, c = x.shape
        side, group = self._factor_s, self._factor_t
        x = x.view(n, t, h // side, side, w // side, side, c).mean(dim=(3, 5))
        if group == 1:
            return x
        x = functional.pad(x, (0, 0, 0, 0, 0, 0, -t % group, 0))  # zero frames before the first
        groups: torch.Tensor = x.unflatten(1, (-1, group))
        return groups.permute(0, 1, 3, 4, 5, 2).flatten(4)


class Down(TorchStep):
    """Half the rows and columns, and half the frames where the block has a ``time_conv``."""

    runs = TORCH_CONV_2D
    reason = "a stride of 2"

    def __init__(self, name: str, module: Any, weights: Weights) -> None:
        super().__init__(name)
        conv = module.resample[1]
        self._weight = weights.channels_last(conv)
        self._bias = conv.bias.detach()
        time_conv = getattr(module, "time_conv", None)
        self._time = None if time_conv is None else TimeConv(time_conv, weights)

    def rows(self, family: Family) -> list[LayerRow]:
        """Two where there is a convolution over time."""
        rows = super().rows(family)
        if self._time is not None:
            rows.append(LayerRow(f"{self.name}.time_conv", TimeConv.runs, TORCH, TimeConv.reason))
        return rows

    def __call__(self, flow: Flow) -> None:
        """Takes ``wide`` and ``shortcut``; leaves ``raw`` and what is to be added to it."""
        x = take(flow, "wide")
        n, t = x.shape[:2]
        frames = x.flatten(0, 1).permute(0, 3, 1, 2)
        x = functional.conv2d(frames, self._weight, stride=2)
        x = x.permute(0, 2, 3, 1).contiguous().unflatten(0, (n, t))
        flow.raw, flow.raw_bias = x, self._bias
        flow.raw_residual = take(flow, "shortcut")
        if self._time is None:
            return
        previous = flow.caches.previous()
        if previous is None:  # the first frame of a clip goes by
            flow.caches.keep(x[:, -1:] + self._bias)
            return
        frames = self._time.after(previous, x, self._bias)
        flow.caches.keep(frames[:, -1:].clone())
        flow.raw, flow.raw_bias = self._time(frames, stride=2), self._time.bias


class TimeConv:
    """A 3x1x1 convolution of frames that stand behind their history."""

    runs = TORCH_CONV
    reason = "a 3x1x1 filter"

    def __init__(self, module: Any, weights: Weights) -> None:
        self._weight = weights.channels_last(module)
        self.bias = module.bias.detach()

    def after(
        self, previous: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``previous``, then ``x`` plus ``bias``, as one tensor."""
        n, history, h, w, c = previous.shape
        frames = x.new_empty(n, history + x.shape[1], h, w, c)
        copy_wide(frames[:, :history], previous)
        if bias is None:
            frames[:, history:] = x
        else:
            torch.add(x, bias, out=frames[:, history:])
        return frames

    def __call__(self, frames: torch.Tensor, stride: int = 1) -> torch.Tensor:
        """Without the bias."""
        x = functional.conv3d(ncthw(frames), self._weight, stride=(stride, 1, 1))
        return nthwc(x).contiguous()


class Up(TorchStep):
    """Twice the rows and columns, and from a clip's second chunk on twice the frames.

    Args:
        name: the up block's path in the model.
        block: the up block.
        weights: packs its weights.
    """

    runs = TORCH_CONV_2D
    reason = "an upsampling"

    def __init__(self, name: str, block: Any, weights: Weights) -> None:
        super().__init__(f"{name}.upsampler")
        conv = block.upsampler.resample[1]
        self._weight = weights.channels_last(conv)
        self._bias = conv.bias.detach()
        time_conv = getattr(block.upsampler, "time_conv", None)
        self._time = None if time_conv is None else TimeConv(time_conv, weights)
        self._shortcut_name = f"{name}.avg_shortcut"
        shortcut = block.avg_shortcut
        self._repeats = shortcut.repeats
        self._factors = (shortcut.factor_t, shortcut.factor_s, shortcut.factor_s)

    def rows(self, family: Family) -> list[LayerRow]:
        """The convolutions and the shortcut."""
        rows = super().rows(family)
        if self._time is not None:
            rows.append(LayerRow(f"{self.name}.time_conv", TimeConv.runs, TORCH, TimeConv.reason))
        return [*rows, LayerRow(self._shortcut_name, "repeat", TORCH, "a copy of pixels")]

    def __call__(self, flow: Flow) -> None:
        """Takes ``wide`` and ``shortcut``; leaves ``raw`` and what is to be added to it."""
        x = take(flow, "wide")[:, :, :-1, :-1]
        if self._time is not None:
            x = self._more_frames(self._time, flow, x)
        n, t = x.shape[:2]
        frames = x.flatten(0, 1).permute(0, 3, 1, 2)
        frames = functional.interpolate(frames, scale_factor=2.0, mode="nearest-exact")
        x = functional.conv2d(frames, self._weight, padding=1)
        flow.raw = x.permute(0, 2, 3, 1).contiguous().unflatten(0, (n, t))
        flow.raw_bias = self._bias
        flow.raw_residual = self._repeated(take(flow, "shortcut"), t)

    def _more_frames(self, time_conv: TimeConv, flow: Flow, x: torch.Tensor) -> torch.Tensor:
        previous = flow.caches.previous()
        if previous is None:  # the first frame of a clip goes by, and leaves no history
            flow.caches.keep(x[:, :0].contiguous())
            return x
        frames = time_conv.after(previous, x)
        flow.caches.keep(frames[:, -MAX_HISTORY_FRAMES:].clone())
        missing = MAX_HISTORY_FRAMES - previous.shape[1]
        frames = functional.pad(frames, (0, 0, 0, 0, 0, 0, missing, 0))
        pairs: torch.Tensor = time_conv(frames).add_(time_conv.bias).unflatten(4, (2, -1))
        return pairs.permute(0, 1, 4, 2, 3, 5).flatten(1, 2)

    def _repeated(self, x: torch.Tensor, frames: int) -> torch.Tensor:
        """Every channel ``repeats`` times, spread over new frames and pixels; the last frames."""
        factor_t, factor_h, factor_w = self._factors
        x = x.repeat_interleave(self._repeats, dim=4)
        spread: torch.Tensor = x.unflatten(4, (-1, factor_t, factor_h, factor_w))
        spread = spread.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(5, 6).flatten(3, 4).flatten(1, 2)
        return spread[:, -frames:].contiguous()
