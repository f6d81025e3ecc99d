# SPDX-License-Identifier: Apache-2.0
"""One call of the norm: sizes, operands, bytes and its results."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from benchmarks.conv3d import chain
from cudnn_blocks import RmsNormSiluGeometry
from cudnn_blocks.geometry.conv3d_shapes import ResidualMode, rmsnorm_silu_pad_shapes
from cudnn_blocks.reference import conv3d_cache as reference

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class NormProblem:
    """One chunk, batch 1, BF16."""

    name: str
    channels: int
    height: int
    width: int
    frames: int
    history_frames: int = 0
    has_residual: bool = False
    """A residual, and the bias of the convolution before."""
    is_tuned: bool = False
    """Inductor times its kernels' configurations: stronger, and slow to compile."""

    flops = None
    """Bytes bound it."""

    @property
    def shape(self) -> str:
        """The shape word of a row: channels, frames, rows and columns."""
        return f"C{self.channels}-T{self.frames}-{self.height}x{self.width}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the op's operands, by its names for them."""
        sizes = (self.height, self.width, self.channels)
        return rmsnorm_silu_pad_shapes(
            RmsNormSiluGeometry(channels=self.channels),
            (1, self.frames, *sizes),
            ResidualMode.ADD if self.has_residual else ResidualMode.NONE,
            has_input_bias=self.has_residual,
            previous_shape=(1, self.history_frames, *sizes) if self.history_frames else None,
        )

    @property
    def results(self) -> tuple[str, ...]:
        """Names of what a launch produces."""
        names = ("padded_output", "cache_output", "residual_output")
        return tuple(name for name in names if name in self.shapes)

    @property
    def traffic_bytes(self) -> int:
        """Every operand once."""
        return torch.bfloat16.itemsize * sum(map(math.prod, self.shapes.values()))

    def make_set(self, device: str) -> Tensors:
        """Random operands, results poisoned."""
        buffers = {
            name: torch.randn(shape, dtype=torch.bfloat16, device=device)
            for name, shape in self.shapes.items()
        }
        buffers["gamma"] = 1 + 0.1 * buffers["gamma"]
        for name in self.results:
            buffers[name].fill_(torch.nan)
        return buffers

    def expected(self, buffers: Tensors) -> Tensors:
        """By the reference."""
        results = {name: torch.full_like(buffers[name], torch.nan) for name in self.results}
        reference.rmsnorm_silu_pad(**(buffers | results))
        return results

    def unfused(self, buffers: Tensors) -> Tensors:
        """By torch, op by op."""
        return layer(*self.layer_operands(buffers))

    def layer_operands(self, buffers: Tensors) -> tuple[torch.Tensor | None, ...]:
        """The operands of ``layer``."""
        names = ("input", "gamma", "input_bias", "residual", "previous")
        return tuple(buffers.get(name) for name in names)


def layer(
    x: torch.Tensor,
    gamma: torch.Tensor,
    input_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    previous: torch.Tensor | None,
) -> Tensors:
    """Bias, residual, norm, SiLU and padding as a torch user writes them."""
    value = x if input_bias is None else x + input_bias
    return chain.post_operations(value, gamma, residual, previous)
