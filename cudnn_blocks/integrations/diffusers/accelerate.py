# SPDX-License-Identifier: Apache-2.0
"""``accelerate_vae_encoder``, ``accelerate_vae_decoder`` and the handle that they return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cudnn_blocks.errors import ContractError
from cudnn_blocks.integrations.calls import ReplacedCall
from cudnn_blocks.integrations.diffusers.builder import Builder
from cudnn_blocks.integrations.diffusers.decoder import decoder_program
from cudnn_blocks.integrations.diffusers.encoder import encoder_program
from cudnn_blocks.integrations.diffusers.family import Family
from cudnn_blocks.integrations.diffusers.flow import Program
from cudnn_blocks.integrations.diffusers.forward import ChunkSizes, StreamedForward
from cudnn_blocks.integrations.diffusers.grouped_encode import GROUP_CHUNKS, GroupedEncode
from cudnn_blocks.integrations.diffusers.model import FAMILY, part_of
from cudnn_blocks.integrations.diffusers.weights import Weights
from cudnn_blocks.integrations.patching import Explanation, Patches
from cudnn_blocks.ops.conv3d_family import DTYPE
from cudnn_blocks.target import Target


def accelerate_vae_encoder(vae: Any) -> AcceleratedVae:
    """``vae.encode`` of a WAN 2.2 ``AutoencoderKLWan``, its encoder on the Conv3D family.

    Weights are packed now, once, and the model's parameters become views of what was packed; plans
    are built for every new size when it comes, or by ``warm()``. ``encode``, with slicing and
    tiling, is called as before.

    Args:
        vae: in evaluation mode, BF16, on one device.

    Returns:
        The handle: ``explain()``, ``warm()``, ``restore()``.

    Raises:
        TypeError: no ``AutoencoderKLWan``.
        ContractError: training mode, another dtype, parameters on several devices.
        NotServedError: a configuration that cannot be carried; the model is as it was.
        LifecycleError: accelerated already.
    """
    return AcceleratedVae(vae, ENCODER)


def accelerate_vae_decoder(vae: Any) -> AcceleratedVae:
    """``vae.decode``, its decoder on the Conv3D family; as :func:`accelerate_vae_encoder`.

    Convolutions that no engine of the target serves well stay on torch, between norms of the
    family: in the WAN 2.2 decoder those of 1024 channels.
    """
    return AcceleratedVae(vae, DECODER)


@dataclass(frozen=True)
class Part:
    """One direction of the model."""

    name: str
    program: Callable[[Any, Builder], Program]
    sizes: Callable[[Any], ChunkSizes]
    pixels: Callable[[Any], int]
    """Pixels of the video along one side of a position of the part's input."""
    calls: tuple[tuple[int, ...], ...]
    """Chunks of each call for clips that between them make every kind of call."""
    loop: Callable[[Any, int], ReplacedCall] | None = None
    """What takes the place of the model's loop over a clip, ``_encode``."""


def _encoder_sizes(vae: Any) -> ChunkSizes:
    shortcuts = [block.avg_shortcut for block in vae.encoder.down_blocks]
    return ChunkSizes(
        channels=vae.encoder.conv_in.in_channels,
        later_frames=prod(shortcut.factor_t for shortcut in shortcuts),
        side=prod(shortcut.factor_s for shortcut in shortcuts),
    )


ENCODER = Part(
    "encoder",
    encoder_program,
    sizes=_encoder_sizes,
    pixels=lambda vae: int(vae.config.patch_size or 1),
    calls=((1, 1, 1), (1, GROUP_CHUNKS, GROUP_CHUNKS)),
    loop=GroupedEncode,
)
DECODER = Part(
    "decoder",
    decoder_program,
    sizes=lambda vae: ChunkSizes(channels=vae.decoder.conv_in.in_channels),
    pixels=lambda vae: int(vae.spatial_compression_ratio),
    calls=((1, 1, 1),),
)
"""A first, a second and a later chunk differ in the history that they find."""


class AcceleratedVae:
    """The handle on an accelerated encoder or decoder.

    Args:
        vae: the model.
        part: which of them.
    """

    def __init__(self, vae: Any, part: Part) -> None:
        module = part_of(vae, part.name)
        self._device = next(module.parameters()).device
        self._family = Family(Target.of_device(self._device))
        self._name = part.name
        self._pixels = part.pixels(vae)
        self._sizes = part.sizes(vae)
        self._calls = part.calls
        self._weights = Weights()
        self._program = part.program(module, Builder(self._family, self._weights))
        self._patches = Patches()
        try:
            self._weights.share()
            self._forward = StreamedForward(
                part.name, module, self._family, self._program, self._sizes
            )
            self._patches.replace(module, "forward", self._forward)
            if part.loop is not None:
                self._patches.replace(vae, "_encode", part.loop(vae, self._sizes.later_frames))
        except BaseException:
            self.restore()
            raise

    def explain(self, target: str | Target | None = None) -> Explanation:
        """What runs every layer, here or on another target, and why where that is torch."""
        family = self._family if target is None else Family(Target.parse(target))
        rows = [row for step in self._program.steps for row in step.rows(family)]
        return Explanation.of(f"{FAMILY}.{self._name} on {family.target}", rows)

    def warm(self, height: int, width: int, batch: int = 1) -> None:
        """Compiles, side by side, all that clips of one size need, whatever their length.

        Args:
            height: of the video, in pixels.
            width: alike.
            batch: clips at a time.

        Raises:
            ContractError: a size that the model does not take.
        """
        for name, size in (("height", height), ("width", width)):
            if size % self._pixels:
                raise ContractError(name, f"a multiple of {self._pixels}", size)
        first = (batch, self._sizes.channels, 1, height // self._pixels, width // self._pixels)
        self._sizes.check(first, is_first=True)
        if not self._family.target.is_cpu:  # where nothing is compiled
            self._build_plans(first)

    def _build_plans(self, first: tuple[int, ...]) -> None:
        """Runs every kind of call on tensors without data, the first one of this shape."""
        batch, channels, _, *sides = first
        with self._family.listing(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            for calls in self._calls:
                caches: list[Any] = [None] * self._forward.num_slots
                for chunks in calls:
                    frames = 1 if caches[0] is None else chunks * self._sizes.later_frames
                    shape = (batch, channels, frames, *sides)
                    x = torch.empty(shape, dtype=DTYPE, device=self._device)
                    self._forward(x, caches, [0])

    def restore(self) -> None:
        """Gives the model its own forward and weights back; a second call does nothing.

        Raises:
            LifecycleError: something has replaced the forward since; remove that first.
        """
        self._patches.restore()
        self._weights.restore()
