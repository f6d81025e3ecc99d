# SPDX-License-Identifier: Apache-2.0
"""Norms and 3x3x3 convolutions between padded activations, on the Conv3D family.

Where the family declines a convolution, torch convolves the same buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from cudnn_blocks import ops
from cudnn_blocks.errors import NotServedError
from cudnn_blocks.geometry.conv3d import (
    MAX_HISTORY_FRAMES,
    Conv3dGeometry,
    RmsNormSiluGeometry,
    cache_frames,
)
from cudnn_blocks.integrations.diffusers.family import Family, Service
from cudnn_blocks.integrations.diffusers.flow import Flow, take
from cudnn_blocks.integrations.diffusers.weights import Weights
from cudnn_blocks.integrations.patching import TORCH, LayerRow

TORCH_CONV = "conv3d, channels last"
WIDE = torch.complex128
"""The dtype of 16 bytes; no arithmetic is done in it."""


def nthwc(x: torch.Tensor) -> torch.Tensor:
    """``[N, C, T, H, W]`` as ``[N, T, H, W, C]``; a view."""
    return x.permute(0, 2, 3, 4, 1)


def ncthw(x: torch.Tensor) -> torch.Tensor:
    """``[N, T, H, W, C]`` as ``[N, C, T, H, W]``; a view, channels last to torch."""
    return x.permute(0, 4, 1, 2, 3)


def copy_wide(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` of equal dtypes, 16 bytes at a time where rows of channels allow.

    torch copies parts of a tensor element by element, which is far from its bandwidth for BF16.
    """
    if (target.shape[-1] * target.element_size()) % WIDE.itemsize == 0:
        target, source = target.view(WIDE), source.view(WIDE)
    target.copy_(source)


class Conv:
    """A 3x3x3 convolution of the model, its weight packed once for whoever runs it.

    Args:
        name: its path in the model.
        module: the layer.
        family: on the model's device.
        weights: packs its weight.
    """

    def __init__(self, name: str, module: Any, family: Family, weights: Weights) -> None:
        self.name = name
        self.geometry = Conv3dGeometry(module.in_channels, module.out_channels)
        self.is_served = self.service(family).engine is not None
        self.weight = weights.pack(module) if self.is_served else weights.channels_last(module)
        self.bias = module.bias.detach()

    def service(self, family: Family) -> Service:
        """What the family says to it."""
        return family.conv(self.geometry.in_channels, self.geometry.out_channels)

    def row(self, service: Service, joined: str = "") -> LayerRow:
        """Its row under what the family says; ``joined`` are the layers in the same launch."""
        if service.engine is None:
            return LayerRow(self.name, TORCH_CONV, TORCH, service.reason)
        return LayerRow(self.name + joined, service.op, service.engine)

    def raw(self, flow: Flow) -> torch.Tensor:
        """The convolution of the padded input alone, without its bias."""
        x = take(flow, "padded")
        if not self.is_served:
            return nthwc(functional.conv3d(ncthw(x), self.weight)).contiguous()
        results = flow.family.run(
            ops.Conv3dRaw,
            {"input": x, "packed_weight": self.weight},
            lambda: {"output": self.geometry.output_shape(x.shape)},
            zero_leading_frames=flow.caches.zero_leading_frames,
        )
        return results["output"]


class Norm:
    """Bias, residual, norm and SiLU of ``raw`` into a padded input; their sum becomes ``skip``.

    Args:
        name: its path in the model.
        module: the norm.
        family: on the model's device.
    """

    def __init__(self, name: str, module: Any, family: Family) -> None:
        self.name = name
        self.gamma = module.gamma.detach().flatten()
        self.geometry = RmsNormSiluGeometry(self.gamma.numel())
        service = family.norm(self.geometry.channels)
        if service.engine is None:
            raise NotServedError(name, service.reason or "the norm", "what RmsNormSiluPad serves")

    def rows(self, family: Family) -> list[LayerRow]:
        """One."""
        service = family.norm(self.geometry.channels)
        engine = service.engine or TORCH
        return [LayerRow(f"{self.name}, SiLU", service.op, engine, service.reason)]

    def __call__(self, flow: Flow) -> None:
        """Takes ``raw`` and what is to be added to it; leaves ``padded`` and ``skip``."""
        raw, bias, residual = take(flow, "raw"), flow.raw_bias, flow.raw_residual
        flow.raw_bias = flow.raw_residual = None
        if bias is None and residual is None:
            self.apply(flow, raw)
            flow.skip = raw
        else:
            self.apply(flow, raw, bias, residual, saves_input=True)

    def apply(
        self,
        flow: Flow,
        raw: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        residual_bias: torch.Tensor | None = None,
        *,
        saves_input: bool = False,
    ) -> None:
        """Leaves ``padded``, and the sum as ``skip`` where it is saved."""
        caches = flow.caches
        given = {
            "input": raw,
            "gamma": self.gamma,
            "input_bias": bias,
            "previous": caches.previous(),
            "residual": residual,
            "residual_bias": residual_bias,
        }

        def written() -> dict[str, tuple[int, ...]]:
            shape = tuple(raw.shape)
            return {
                "padded_output": self.geometry.padded_output_shape(shape),
                "cache_output": self.geometry.cache_output_shape(shape, caches.history_frames),
                **({"residual_output": shape} if saves_input else {}),
            }

        results = flow.family.run(ops.RmsNormSiluPad, given, written, saves_input)
        flow.padded = results["padded_output"]
        if saves_input:
            flow.skip = results["residual_output"]
        caches.keep(results["cache_output"])


class ConvNorm:
    """A convolution and the norm and SiLU behind it, in one launch or in two.

    Args:
        conv: the convolution.
        norm: what follows.
        family: on the model's device.
        adds: the convolution ends a residual block: ``skip`` is added, and the sum takes its place.
    """

    def __init__(self, conv: Conv, norm: Norm, family: Family, *, adds: bool) -> None:
        self.conv = conv
        self.norm = norm
        self.adds = adds
        self.is_fused = self._service(family).engine is not None

    def _service(self, family: Family) -> Service:
        geometry = self.conv.geometry
        return family.conv_norm(geometry.in_channels, geometry.out_channels)

    def rows(self, family: Family) -> list[LayerRow]:
        """One where both are one launch."""
        service = self._service(family)
        if service.engine is not None:
            return [self.conv.row(service, f", {self.norm.name.rpartition('.')[2]}, SiLU")]
        return [self.conv.row(self.conv.service(family)), *self.norm.rows(family)]

    def __call__(self, flow: Flow) -> None:
        """Takes ``padded``, and ``skip`` where it adds; leaves both for the next block."""
        residual = residual_bias = None
        if self.adds:
            residual, residual_bias = take(flow, "skip"), flow.skip_bias
            flow.skip_bias = None
        if self.is_fused:
            self._fused(flow, residual, residual_bias)
        else:
            raw, bias = self.conv.raw(flow), self.conv.bias
            self.norm.apply(flow, raw, bias, residual, residual_bias, saves_input=self.adds)

    def _fused(
        self, flow: Flow, residual: torch.Tensor | None, residual_bias: torch.Tensor | None
    ) -> None:
        x, caches, geometry = take(flow, "padded"), flow.caches, self.conv.geometry
        given = {
            "input": x,
            "packed_weight": self.conv.weight,
            "bias": self.conv.bias,
            "gamma": self.norm.gamma,
            "residual": residual,
            "residual_bias": residual_bias,
        }

        def written() -> dict[str, tuple[int, ...]]:
            return {
                "padded_output": geometry.padded_output_shape(x.shape),
                "cache_output": geometry.cache_output_shape(x.shape, caches.history_frames),
                **({"residual_output": geometry.output_shape(x.shape)} if self.adds else {}),
            }

        results = flow.family.run(
            ops.Conv3dRmsNormSiluPad,
            given,
            written,
            history_frames=caches.history_frames,
            zero_leading_frames=caches.zero_leading_frames,
        )
        padded, cache = results["padded_output"], results["cache_output"]
        if (previous := caches.previous()) is not None:  # the op leaves room for it
            first = MAX_HISTORY_FRAMES - previous.shape[1]
            copy_wide(padded[:, first:MAX_HISTORY_FRAMES, 1:-1, 1:-1], previous)
            if num_old := cache.shape[1] - cache_frames(x.shape[1] - MAX_HISTORY_FRAMES, 0):
                copy_wide(cache[:, :num_old], previous[:, -num_old:])
        flow.padded = padded
        if self.adds:
            flow.skip = results["residual_output"]
        caches.keep(cache)


class ConvAdd:
    """The last convolution of a residual block where no norm follows: ``skip`` is added.

    Args:
        conv: the convolution.
    """

    def __init__(self, conv: Conv) -> None:
        self.conv = conv

    def rows(self, family: Family) -> list[LayerRow]:
        """One."""
        geometry = self.conv.geometry
        return [self.conv.row(family.conv_add(geometry.in_channels, geometry.out_channels))]

    def __call__(self, flow: Flow) -> None:
        """Takes ``padded`` and ``skip``; leaves ``wide``."""
        conv, skip, skip_bias = self.conv, take(flow, "skip"), flow.skip_bias
        flow.skip_bias = None
        if not conv.is_served:
            skip = skip if skip_bias is None else skip + skip_bias
            value = conv.raw(flow).add_(conv.bias).add_(skip)
            flow.wide = functional.pad(value, (0, 0, 0, 1, 0, 1))
            return
        x = take(flow, "padded")
        results = flow.family.run(
            ops.Conv3dBiasResidualPad,
            {
                "input": x,
                "packed_weight": conv.weight,
                "bias": conv.bias,
                "residual": skip,
                "residual_bias": skip_bias,
            },
            lambda: {"padded_output": conv.geometry.spatial_padded_output_shape(x.shape)},
            zero_leading_frames=flow.caches.zero_leading_frames,
        )
        flow.wide = results["padded_output"]
