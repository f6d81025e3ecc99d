# SPDX-License-Identifier: Apache-2.0
"""A clip, the model and its exact result; the decoder is a stub, as nothing of it runs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.conv3d.cases import LAYERS
from cudnn_blocks.integrations.diffusers import random_model

Tensors = dict[str, torch.Tensor]
HEIGHT, WIDTH = 704, 1280
LAYER_COUNTS = (4, 1, 3, 1, 3, 8, 1)
"""How often each of ``LAYERS`` occurs in the encoder."""
PLANE_TAPS = 9
CHUNK = 4
"""Frames of every chunk but the first."""
STUB_DECODER = {"decoder_base_dim": 8}


@functools.cache
def eager_model(device: str, **changes: Any) -> Any:
    """The model as diffusers has it, seeded random weights; one per process."""
    return random_model(device, **{**STUB_DECODER, **changes})


@dataclass(frozen=True)
class EncodeProblem:
    """Batch 1, BF16, NCTHW video in -1 .. 1."""

    frames: int
    height: int = HEIGHT
    width: int = WIDTH
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Entries of the model's configuration that are not WAN 2.2's."""

    name = "wan-2.2"

    @property
    def shape(self) -> str:
        """The last word of a row."""
        return f"{self.height}x{self.width}x{self.frames}"

    @property
    def traffic_bytes(self) -> int:
        """Of the video alone: the products bound the time."""
        return 3 * self.frames * self.height * self.width * torch.bfloat16.itemsize

    @property
    def flops(self) -> int:
        """Of the 3x3x3 convolutions behind the first, without products with missing history.

        That is 97 % of the encoder. A first frame meets one plane of each filter, and the first
        frame of the second chunk two.
        """
        later_chunks = (self.frames - 1) // CHUNK
        total = 0
        for layer, count in zip(LAYERS, LAYER_COUNTS, strict=True):
            planes = 1 + 3 * layer.later_frames * later_chunks - (later_chunks > 0)
            pixels = layer.height * layer.width * self.height * self.width // (HEIGHT * WIDTH)
            taps = PLANE_TAPS * layer.in_channels * layer.out_channels
            total += count * 2 * taps * pixels * planes
        return total

    def make_set(self, device: str) -> Tensors:
        """Noise: no layer is the faster for it."""
        shape = (1, 3, self.frames, self.height, self.width)
        return {"video": torch.rand(shape, device=device).mul_(2).sub_(1).bfloat16()}

    def model(self, device: str) -> Any:
        """A model of its own with the weights that every arm has."""
        return copy.deepcopy(eager_model(device, **self.changes))

    def expected(self, buffers: Tensors, device: str) -> torch.Tensor:
        """The moments by the model in FP32."""
        exact = self.model(device).float()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return encode(exact, buffers["video"].float())


def encode(vae: Any, video: torch.Tensor) -> torch.Tensor:
    """The call that is timed: caches and results are allocated inside."""
    moments: torch.Tensor = vae.encode(video).latent_dist.parameters
    return moments
