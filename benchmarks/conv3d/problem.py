# SPDX-License-Identifier: Apache-2.0
"""One valid convolution, bare or fused: sizes, operands, bytes, operations and its results."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from benchmarks.conv3d import chain
from cudnn_blocks import Conv3dGeometry, pack_conv3d_weight
from cudnn_blocks.geometry.conv3d import MAX_HISTORY_FRAMES
from cudnn_blocks.geometry.conv3d_shapes import (
    ResidualMode,
    conv3d_raw_shapes,
    conv3d_rmsnorm_silu_pad_shapes,
)
from cudnn_blocks.reference import conv3d as reference

TAPS = 27
PLANE_TAPS = 9
MAX_FUSED_CHANNELS = 320
"""Beyond it the op declines and names ``Conv3dRaw``, then ``RmsNormSiluPad``."""

Tensors = dict[str, torch.Tensor]


CONV_STD = 0.125
"""Of a convolution's sums: small enough that one rounded the other way twice, as happens a few
times in 10**8, stays within the tolerance where the residual cancels the rest."""


@dataclass(frozen=True)
class Conv3dProblem:
    """One chunk of one layer, batch 1, BF16."""

    name: str
    in_channels: int
    out_channels: int
    height: int
    width: int
    """Rows and columns of the output; the input has a border of one more."""
    frames: int
    """Output frames; the input has two more."""
    is_fused: bool = False
    """Bias, norm, SiLU and padding behind the convolution."""
    has_residual: bool = False
    history_frames: int = 0
    """Frames of the chunk before, which go into the padded output."""
    zero_leading_frames: int = 0
    """Leading planes of the input that are zero."""
    has_every_engine: bool = False
    """Time our other engines as well."""
    is_tuned: bool = False
    """Inductor times its kernels' configurations: stronger, and slow to compile."""

    @property
    def shape(self) -> str:
        """The shape word of a row: output frames, rows and columns."""
        return f"T{self.frames}-{self.height}x{self.width}"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """``[1, T+2, H+2, W+2, Ci]``."""
        return (1, self.frames + 2, self.height + 2, self.width + 2, self.in_channels)

    @property
    def is_one_op(self) -> bool:
        """True where one op of ours does it all."""
        return not self.is_fused or self.out_channels <= MAX_FUSED_CHANNELS

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the op's operands, by its names for them."""
        geometry = Conv3dGeometry(in_channels=self.in_channels, out_channels=self.out_channels)
        if not self.is_fused:
            return conv3d_raw_shapes(geometry, self.input_shape)
        return conv3d_rmsnorm_silu_pad_shapes(
            geometry,
            self.input_shape,
            ResidualMode.ADD if self.has_residual else ResidualMode.NONE,
            history_frames=self.history_frames,
        )

    @property
    def results(self) -> tuple[str, ...]:
        """Names of what a launch produces."""
        names = ("output", "padded_output", "cache_output", "residual_output")
        return tuple(name for name in names if name in self.shapes)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """``[1, T, H, W, Co]``."""
        return (1, self.frames, self.height, self.width, self.out_channels)

    @property
    def traffic_bytes(self) -> int:
        """Every operand once, the weight without the zeros of its packing, history included."""
        sizes = [math.prod(shape) for name, shape in self.shapes.items() if name != "packed_weight"]
        weight = self.out_channels * TAPS * self.in_channels
        history = math.prod(self.output_shape) // self.frames * self.history_frames
        return torch.bfloat16.itemsize * (sum(sizes) + weight + history)

    @property
    def flops(self) -> int:
        """Multiply-adds of the convolution as two each, those on zero planes left out."""
        zero_planes = sum(max(self.zero_leading_frames - t, 0) for t in range(self.frames))
        taps = PLANE_TAPS * (3 * self.frames - zero_planes)
        return 2 * taps * self.height * self.width * self.in_channels * self.out_channels

    def make_set(self, device: str) -> Tensors:
        """Random operands, results poisoned; activations of variance 1, as residuals have."""

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device) * scale

        weight = normal(
            self.out_channels,
            *(3, 3, 3, self.in_channels),
            scale=CONV_STD * (TAPS * self.in_channels) ** -0.5,
        ).permute(0, 4, 1, 2, 3)
        buffers = {
            "input": normal(*self.input_shape),
            "weight": weight,
            "packed_weight": pack_conv3d_weight(weight),
        }
        buffers["input"][:, : self.zero_leading_frames] = 0
        if self.is_fused:
            buffers["bias"] = normal(self.out_channels, scale=0.1)
            buffers["gamma"] = 1 + normal(self.out_channels, scale=0.1)
        if self.has_residual:
            buffers["residual"] = normal(*self.output_shape)
        if self.history_frames:
            n, _, *sizes = self.output_shape
            buffers["history"] = normal(n, self.history_frames, *sizes)
        if not self.is_one_op:
            buffers["output"] = normal(*self.output_shape)
        for name in self.results:
            buffers[name] = normal(*self.shapes[name]).fill_(torch.nan)
        return buffers

    def expected(self, buffers: Tensors) -> Tensors:
        """By the reference: FP32 sums, every rounding of the contract."""
        results = {name: torch.full_like(buffers[name], torch.nan) for name in self.results}
        operands = {
            name: tensor for name, tensor in (buffers | results).items() if name in self.shapes
        }
        if not self.is_fused:
            reference.conv3d_raw(**operands)
            return results
        reference.conv3d_rmsnorm_silu_pad(**operands, history_frames=self.history_frames)
        if self.history_frames:
            padded, cache = results["padded_output"], results["cache_output"]
            history = buffers["history"]
            first = MAX_HISTORY_FRAMES - self.history_frames
            padded[:, first:MAX_HISTORY_FRAMES, 1:-1, 1:-1] = history
            older = max(cache.shape[1] - self.frames, 0)
            cache[:, :older] = history[:, self.history_frames - older :]
        return results

    def unfused(self, buffers: Tensors) -> Tensors:
        """By torch, which on a GPU is cuDNN, op by op."""
        if not self.is_fused:
            return {"output": chain.convolve(buffers["input"], buffers["weight"])}
        return chain.fused_layer(*self.layer_operands(buffers))

    def layer_operands(self, buffers: Tensors) -> tuple[torch.Tensor | None, ...]:
        """The operands of ``chain.fused_layer``."""
        names = ("input", "weight", "bias", "gamma", "residual", "history")
        return tuple(buffers.get(name) for name in names)
