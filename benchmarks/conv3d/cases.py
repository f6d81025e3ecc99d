# SPDX-License-Identifier: Apache-2.0
"""The 3x3x3 layers of the WAN 2.2 encoder at 704x1280, and what they have to show, as data.

A clip comes in chunks of 1 + 4 + 4 ... frames; ``first`` is the first chunk, ``later`` any other.
The strided and pointwise convolutions of the encoder are not of this family.

Sizes do not change between arms: planes before a clip are random data unless a case is about them.
``portable`` is there to be right everywhere, and slow beside the rest: it is timed at one shape per
pair of channels, on the first chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.conv3d.causal_problem import CausalProblem
from benchmarks.conv3d.problem import Conv3dProblem
from benchmarks.harness.goals import Goal

FIRST, LATER, WHOLE = "first", "later", "whole"
EITHER = "first+later"
"""The bare convolution of a layer that sees one frame of every chunk."""


@dataclass(frozen=True)
class Layer:
    """A row of the encoder."""

    in_channels: int
    out_channels: int
    height: int
    width: int
    later_frames: int
    """Output frames of a later chunk; the first has one."""
    is_normalized: bool = True
    """False for the encoder's last layer, behind which nothing is fused."""
    has_goals: bool = False
    """The fused layer has to beat torch.compile by a stated factor."""
    has_every_engine: bool = True
    """False where an earlier row has the same channels."""

    @property
    def channels(self) -> str:
        """Middle word of its cases."""
        return f"{self.in_channels}-{self.out_channels}"

    def problem(self, chunk: str, frames: int, **fields: object) -> Conv3dProblem:
        """One case of this layer."""
        sizes = (self.in_channels, self.out_channels, self.height, self.width, frames)
        every = self.has_every_engine and chunk in (FIRST, EITHER)
        name = f"{self.channels}/{chunk}"
        return Conv3dProblem(name, *sizes, has_every_engine=every, **fields)


LAYERS = (
    Layer(160, 160, 352, 640, 4, has_goals=True),
    Layer(160, 320, 176, 320, 4, has_goals=True),
    Layer(320, 320, 176, 320, 4, has_goals=True),
    Layer(320, 640, 88, 160, 2),
    Layer(640, 640, 88, 160, 2),
    Layer(640, 640, 44, 80, 1, has_every_engine=False),
    Layer(640, 96, 44, 80, 1, is_normalized=False),
)


def _bare(layer: Layer) -> tuple[Conv3dProblem, ...]:
    if layer.later_frames == 1:
        return (layer.problem(EITHER, 1),)
    return layer.problem(FIRST, 1), layer.problem(LATER, layer.later_frames)


def _fused(layer: Layer) -> tuple[Conv3dProblem, ...]:
    """First chunk, later chunk with its history, and as many frames without any."""
    fused = {"is_fused": True, "has_residual": True, "is_tuned": layer.has_goals}
    later = layer.later_frames
    return (
        layer.problem(FIRST, 1, **fused),
        layer.problem(LATER, later, history_frames=2, **fused),
        *([layer.problem(WHOLE, later, **fused)] if layer.has_goals else []),
    )


BARE = tuple(problem for layer in LAYERS for problem in _bare(layer))
FUSED = tuple(problem for layer in LAYERS if layer.is_normalized for problem in _fused(layer))
HINT = tuple(
    LAYERS[0].problem(
        f"{FIRST}{suffix}", 1, is_fused=True, has_residual=has_residual, zero_leading_frames=2
    )
    for suffix, has_residual in (("", False), ("+residual", True))
)
CAUSAL = (
    CausalProblem(f"12-160/{FIRST}", 352, 640, 1, has_every_engine=True),
    CausalProblem(f"12-160/{LATER}", 352, 640, 4, history_frames=2),
)

GOALS = (
    Goal("bare/*", 1.0, forgives_spread=True),
    Goal("bare/160-160/*", 1.40),
    Goal("bare/160-320/*", 1.20),
    Goal("bare/320-320/*", 1.18),
    Goal("bare/320-640/*", 1.20),
    Goal("bare/640-640/*", 1.20),
    Goal("fused/160-160/*", 1.60),
    Goal("fused/160-320/*", 1.50),
    Goal("fused/320-320/*", 1.35),
    Goal("hint/160-160/*", 2.40),
    Goal("causal/12-160/*", 3.50),
)
"""Ratios to the best peer on an H200."""
