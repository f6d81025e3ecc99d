# SPDX-License-Identifier: Apache-2.0
"""The forward that takes the place of the encoder's or the decoder's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cudnn_blocks.errors import ContractError
from cudnn_blocks.integrations.calls import ReplacedCall
from cudnn_blocks.integrations.diffusers.family import Family
from cudnn_blocks.integrations.diffusers.flow import Caches, Flow, Program, joined, run, take
from cudnn_blocks.integrations.diffusers.model import Watch
from cudnn_blocks.ops.conv3d_family import DTYPE


@dataclass(frozen=True)
class ChunkSizes:
    """The input ``[N, channels, T, H, W]`` of a call; the first of a clip has T = 1."""

    channels: int
    later_frames: int = 1
    """Frames of a later chunk; a call takes one or several."""
    side: int = 1
    """H and W are multiples of this."""

    def check(self, shape: tuple[int, ...], *, is_first: bool) -> None:
        """ContractError for another shape."""
        frames = "1 for the first chunk" if is_first else f"a multiple of {self.later_frames}"
        if (
            len(shape) != 5
            or shape[1] != self.channels
            or (shape[2] != 1 if is_first else shape[2] % self.later_frames or not shape[2])
            or any(not size or size % self.side for size in shape[3:])
        ):
            expected = (
                f"shape [N, {self.channels}, T, H, W] with T {frames}, H and W multiples of "
                f"{self.side}"
            )
            raise ContractError("x", expected, shape)


class StreamedForward(ReplacedCall):
    """A call through all steps; what the next one needs goes into the model's own caches.

    Args:
        part: ``encoder`` or ``decoder``.
        module: whose forward this takes the place of.
        family: on the module's device.
        program: its steps, made of the module's weights.
        sizes: of its chunks.
    """

    def __init__(
        self, part: str, module: nn.Module, family: Family, program: Program, sizes: ChunkSizes
    ) -> None:
        self._family = family
        self._program = program
        self._sizes = sizes
        self._device = next(module.parameters()).device
        self._watch = Watch(part, module)
        self.num_slots = sum(isinstance(inner, nn.Conv3d) for inner in module.modules())

    def __call__(
        self,
        x: torch.Tensor,
        feat_cache: list[Any] | None = None,
        feat_idx: Sequence[int] = (0,),
        first_chunk: bool = False,
    ) -> torch.Tensor:
        """The part's output ``[N, C, T, H, W]``, contiguous; arguments as the model passes them."""
        if feat_cache is None:
            raise ContractError("feat_cache", "the list of caches that encode() passes", None)
        is_first = feat_cache[0] is None
        if is_first:
            self._watch.check()
        self._check_input(x, is_first=is_first)
        flows = []
        for chunk in x.split(1 if is_first else self._sizes.later_frames, dim=2):
            flows.append(Flow(self._family, Caches(feat_cache), chunk))
            run(self._program.by_chunk, flows[-1])
        if self._program.by_group:
            flows = [joined(flows)]
            run(self._program.by_group, flows[0])
        if isinstance(feat_idx, list):
            feat_idx[0] += flows[-1].caches.position
        results = [take(flow, "x") for flow in flows]
        return results[0] if len(results) == 1 else torch.cat(results, dim=2)

    def _check_input(self, x: torch.Tensor, *, is_first: bool) -> None:
        self._watch.check_grad_mode(x)
        if x.dtype != DTYPE:
            raise ContractError("x", f"{DTYPE}", x.dtype)
        if x.device != self._device:
            raise ContractError("x", f"a tensor on {self._device}, as the model", x.device)
        self._sizes.check(tuple(x.shape), is_first=is_first)
