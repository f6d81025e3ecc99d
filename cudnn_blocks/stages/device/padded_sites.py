# SPDX-License-Identifier: Apache-2.0
"""The pixels of a causally padded activation ``[N, T + 2, H + 2, W + 2, C]``, as in memory."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32

LEADING_FRAMES = 2


@dataclass(frozen=True)
class Site:
    """One pixel: what it holds, and its row in every ``[..., C]`` operand, seen as ``[rows, C]``.

    Rows and coordinates mean nothing where their condition is false.
    """

    n: Int32
    t: Int32
    h: Int32
    w: Int32
    """Coordinates in the chunk ``[N, T, H, W]``, where the site is current."""
    padded_row: Int32
    is_inside: Boolean
    """Within ``padded_output``; false for the surplus of the last CTA."""
    is_current: Boolean
    """A frame of this chunk, not the border."""
    current_row: Int32
    """In ``[N, T, H, W, C]``."""
    is_history: Boolean
    """A frame of ``previous``, not the border."""
    history_row: Int32
    """In ``[N, P, H, W, C]``."""
    is_cached: Boolean
    """Among the last frames, which the cache keeps too."""
    cache_row: Int32
    """In ``[N, min(2, T + P), H, W, C]``."""


@dataclass(frozen=True)
class PaddedSites:
    """Extents of one launch; those of a padded plane are fast divisors.

    Sites have 32-bit numbers, also the last CTA's beyond the end: at most 2**31 - 2**16 of them.
    """

    frames: cute.FastDivmodDivisorV2
    height: cute.FastDivmodDivisorV2
    width: cute.FastDivmodDivisorV2
    num_sites: Int32
    history_frames: Int32
    cache_frames: Int32

    @classmethod
    def of(cls, mY: cute.Tensor, history_frames: Int32, cache_frames: Int32) -> "PaddedSites":
        """The sites of a padded activation."""
        n, t, h, w, _ = mY.shape
        divisor = cute.fast_divmod_create_divisor_v2
        return cls(divisor(t), divisor(h), divisor(w), n * t * h * w, history_frames, cache_frames)

    @cute.jit
    def site(self, index: Int32) -> Site:
        """The site with this number; 32-bit arithmetic."""
        line, w = divmod(index, self.width)
        plane, h = divmod(line, self.height)
        n, t = divmod(plane, self.frames)
        frames, height, width = self.frames.divisor, self.height.divisor - 2, self.width.divisor - 2
        is_inside = index < self.num_sites
        is_interior = is_inside & (h > 0) & (h <= height) & (w > 0) & (w <= width)
        pixel = (h - 1) * width + w - 1
        pixels = height * width
        t_current = t - LEADING_FRAMES
        t_history = t_current + self.history_frames
        t_cache = t - frames + self.cache_frames
        return Site(
            n=n,
            t=t_current,
            h=h - 1,
            w=w - 1,
            padded_row=index,
            is_inside=is_inside,
            is_current=is_interior & (t_current >= 0),
            current_row=(n * (frames - LEADING_FRAMES) + t_current) * pixels + pixel,
            is_history=is_interior & (t_current < 0) & (t_history >= 0),
            history_row=(n * self.history_frames + t_history) * pixels + pixel,
            is_cached=is_interior & (t_cache >= 0),
            cache_row=(n * self.cache_frames + t_cache) * pixels + pixel,
        )
