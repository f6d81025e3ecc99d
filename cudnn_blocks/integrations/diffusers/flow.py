# SPDX-License-Identifier: Apache-2.0
"""A chunk on its way through the model: what one step leaves for the next, and the caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from cudnn_blocks.geometry.conv3d import MAX_HISTORY_FRAMES
from cudnn_blocks.integrations.diffusers.family import Family
from cudnn_blocks.integrations.patching import LayerRow


class Caches:
    """The model's own list of caches, one slot per convolution in the order they run.

    A slot holds what went into its convolution last, ``[N, 1 or 2, H, W, C]``, or None at the
    beginning of a clip. The model empties the list after every clip.
    """

    def __init__(self, slots: list[Any], first: int = 0) -> None:
        self.slots = slots
        self.position = first
        """The next slot: of a 3x3x3 convolution at first."""
        self.history_frames = 0 if slots[first] is None else int(slots[first].shape[1])
        """Frames that every 3x3x3 convolution from here on finds, the same for all: 0, 1 or 2."""

    @property
    def zero_leading_frames(self) -> int:
        """Leading planes of a padded input that stand in for missing history."""
        return MAX_HISTORY_FRAMES - self.history_frames

    def previous(self) -> torch.Tensor | None:
        """What the next slot holds."""
        found: torch.Tensor | None = self.slots[self.position]
        return found

    def keep(self, cache: torch.Tensor) -> None:
        """Fills the next slot and moves on."""
        self.slots[self.position] = cache
        self.position += 1


@dataclass
class Flow:
    """The tensors between two steps, all ``N T H W C``; a step takes some and leaves others."""

    family: Family
    caches: Caches
    x: torch.Tensor | None
    """The chunk ``[N, C, T, H, W]``; at the end the result, alike."""
    raw: torch.Tensor | None = None
    """What the next norm reads, contiguous: an activation still without ``raw_bias``."""
    raw_bias: torch.Tensor | None = None
    raw_residual: torch.Tensor | None = None
    """What the norm has to add to that."""
    padded: torch.Tensor | None = None
    """The padded input of the next convolution."""
    skip: torch.Tensor | None = None
    """What a residual block's last convolution adds, still without ``skip_bias``; contiguous."""
    skip_bias: torch.Tensor | None = None
    wide: torch.Tensor | None = None
    """A block's result with a zero row below and a zero column to the right."""
    shortcut: torch.Tensor | None = None
    """What is added behind several residual blocks."""


class Step(Protocol):
    """One step of the model."""

    def rows(self, family: Family) -> list[LayerRow]:
        """What runs its layers on the family's target."""

    def __call__(self, flow: Flow) -> None:
        """Runs on what ``flow`` holds."""


@dataclass(frozen=True)
class Program:
    """The steps of a part of the model."""

    by_chunk: list[Step]
    """For one chunk at a time."""
    by_group: list[Step] = field(default_factory=list)
    """Behind them, for all chunks of a call at once."""

    @property
    def steps(self) -> list[Step]:
        """All, in order."""
        return self.by_chunk + self.by_group


def run(steps: Sequence[Step], flow: Flow) -> None:
    """One after the other."""
    for step in steps:
        step(flow)


def joined(flows: Sequence[Flow]) -> Flow:
    """Chunks before a norm as one chunk, in order; they are used up."""
    first, caches = flows[0], flows[-1].caches
    return Flow(
        first.family,
        Caches(caches.slots, caches.position),
        x=None,
        raw=_cat([take(flow, "raw") for flow in flows]),
        raw_bias=first.raw_bias,
        raw_residual=(
            None
            if first.raw_residual is None
            else _cat([take(flow, "raw_residual") for flow in flows])
        ),
    )


def _cat(frames: list[torch.Tensor]) -> torch.Tensor:
    return frames[0] if len(frames) == 1 else torch.cat(frames, dim=1)


def take(flow: Flow, name: str) -> torch.Tensor:
    """A tensor that an earlier step has left; the flow no longer holds it."""
    tensor = getattr(flow, name)
    assert tensor is not None, f"no step has left {name}"
    setattr(flow, name, None)
    return tensor  # type: ignore[no-any-return]
