# SPDX-License-Identifier: Apache-2.0
"""The streaming first layer, 12 -> 160: sizes, operands, bytes, operations and its results."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from benchmarks.conv3d import chain
from benchmarks.conv3d.problem import PLANE_TAPS, TAPS, Tensors
from cudnn_blocks import CausalConv3dGeometry, pack_causal_conv3d_weight
from cudnn_blocks.geometry.conv3d import MAX_HISTORY_FRAMES
from cudnn_blocks.geometry.conv3d_shapes import causal_conv3d_with_cache_shapes
from cudnn_blocks.reference import conv3d_cache as reference

GEOMETRY = CausalConv3dGeometry()


@dataclass(frozen=True)
class CausalProblem:
    """One chunk of raw video, batch 1, BF16, planes of channels as a decoder hands them over."""

    name: str
    height: int
    width: int
    frames: int
    history_frames: int = 0
    has_every_engine: bool = False
    """Time our other engines as well."""

    results = ("output", "cache_output")

    @property
    def shape(self) -> str:
        """The shape word of a row: frames, rows and columns."""
        return f"T{self.frames}-{self.height}x{self.width}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the op's operands, by its names for them."""
        sizes = (self.frames, self.height, self.width)
        previous = (1, self.history_frames, *sizes[1:], GEOMETRY.in_channels)
        return causal_conv3d_with_cache_shapes(
            GEOMETRY,
            (1, GEOMETRY.in_channels, *sizes),
            previous_shape=previous if self.history_frames else None,
        )

    @property
    def traffic_bytes(self) -> int:
        """Every operand once; the padded input is scratch and counts as nothing."""
        scratch = ("padded_input", "packed_weight")
        sizes = [math.prod(shape) for name, shape in self.shapes.items() if name not in scratch]
        weight = GEOMETRY.out_channels * TAPS * GEOMETRY.in_channels
        return torch.bfloat16.itemsize * (sum(sizes) + weight)

    @property
    def flops(self) -> int:
        """Multiply-adds as two each, without padding channels and missing history."""
        missing = MAX_HISTORY_FRAMES - self.history_frames
        zero_planes = sum(max(missing - t, 0) for t in range(self.frames))
        taps = PLANE_TAPS * (3 * self.frames - zero_planes)
        channels = GEOMETRY.in_channels * GEOMETRY.out_channels
        return 2 * taps * self.height * self.width * channels

    def make_set(self, device: str) -> Tensors:
        """Random operands, written ones poisoned."""

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device) * scale

        out_channels, in_channels = GEOMETRY.out_channels, GEOMETRY.in_channels
        weight = normal(out_channels, 3, 3, 3, in_channels, scale=(TAPS * in_channels) ** -0.5)
        weight = weight.permute(0, 4, 1, 2, 3)
        buffers = {name: normal(*shape) for name, shape in self.shapes.items()}
        for name in ("padded_input", *self.results):
            buffers[name].fill_(torch.nan)
        return buffers | {"weight": weight, "packed_weight": pack_causal_conv3d_weight(weight)}

    def expected(self, buffers: Tensors) -> Tensors:
        """By the reference."""
        results = {name: torch.full_like(buffers[name], torch.nan) for name in self.results}
        scratch = {"padded_input": torch.empty_like(buffers["padded_input"])}
        operands = {name: (buffers | results | scratch)[name] for name in self.shapes}
        reference.causal_conv3d_with_cache(**operands)
        return results

    def unfused(self, buffers: Tensors) -> Tensors:
        """By torch, which on a GPU is cuDNN, op by op."""
        return chain.causal_layer(*self.layer_operands(buffers))

    def layer_operands(self, buffers: Tensors) -> tuple[torch.Tensor | None, ...]:
        """The operands of ``chain.causal_layer``."""
        return tuple(buffers.get(name) for name in ("input", "weight", "previous"))

    def padded(self, buffers: Tensors, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolution's input and weight, ready made with 12 or more channels, others zero.

        A peer that takes these leaves out the packing that ours includes.
        """
        shape = (*self.shapes["padded_input"][:4], channels)
        x = torch.zeros(shape, dtype=torch.bfloat16, device=buffers["input"].device)
        inside = x[
            :, MAX_HISTORY_FRAMES - self.history_frames :, 1:-1, 1:-1, : GEOMETRY.in_channels
        ]
        inside[:, self.history_frames :] = buffers["input"].permute(0, 2, 3, 4, 1)
        if self.history_frames:
            inside[:, : self.history_frames] = buffers["previous"]
        weight = torch.zeros(
            GEOMETRY.out_channels, 3, 3, 3, channels, dtype=x.dtype, device=x.device
        )
        weight[..., : GEOMETRY.in_channels] = buffers["weight"].permute(0, 2, 3, 4, 1)
        return x, weight.permute(0, 4, 1, 2, 3)
