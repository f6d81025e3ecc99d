# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the portable Conv3D kernel; its table of tiles.

A CTA computes ``width x height`` output pixels of one frame times a tile of output channels. The
order of every sum goes by Ci and Co alone: whatever tile is chosen, the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudnn_blocks.geometry.conv3d import (
    CAUSAL_PACKED_COLUMNS,
    CAUSAL_PADDED_CHANNELS,
    KERNEL,
    packed_channels,
)
from cudnn_blocks.stages.conv3d.epilogues import NORM, NORM_PAD, RAW

if TYPE_CHECKING:
    from cudnn_blocks.target import Target

KIB = 1024
ELEMENT_BYTES = 2
INDEX_BYTES = 4
WARP_THREADS = 32
FULL_SM_THREADS = 256
"""Threads that fill an SM's 64 Ki registers, at 255 each."""
VEC = 8
"""Elements of one 16-byte copy."""
TAPS_PER_PLANE = 9
CHUNK = 32
"""Input channels of one K chunk: a 64-byte row in shared memory."""
MMA_K = 16
GROUP = 16
"""Channels that a quad of threads holds together, 4 consecutive ones each."""
QUAD = 4
WARP_BLOCKS = 4
"""m16 blocks of a warp: each 8 pixels of w in two rows of h."""
BLOCK_PIXELS = 16
NUM_A_STAGES = 2
NUM_B_STAGES = 3
"""Divides the taps of a plane, so that a tap's stage is known at compile time."""
MAX_TILE_CHANNELS = 160
"""80 channels and 64 pixels are 160 FP32 accumulators a thread; two warps lie side by side."""

OTRSI, TAPS16 = "otrsi", "taps16"
"""Packed weights: ``[Co, 3, 3, 3, ceil64(Ci)]``, and ``[Co, 448]`` of the causal convolution."""

HALO_PITCH = {32: 34, 16: 20, 8: 12}
"""Rows of an A stage per row of a tile's halo, by tile width: ``width + 2`` or more, and such that
blocks of a warp which lie below each other are a multiple of 8 rows apart, so that all blocks share
one swizzle."""
TILES = {
    4: ((32, 8), (16, 16), (8, 32)),
    2: ((32, 4), (16, 8), (8, 16)),
    1: ((32, 2), (16, 4), (8, 8)),
}
"""(width, height) of the tiles by warps along the pixels, the preferred shape first."""
RATE = {(8, 1): 1.0, (4, 2): 0.97, (4, 1): 0.7}
"""Relative speed of an SM by warps of a CTA and CTAs at once. Estimates: small tiles copy more
weights, and four warps leave latencies bare."""


@dataclass(frozen=True)
class Conv3dKernelConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    in_channels: int
    out_channels: int
    epilogue: str
    has_residual: bool
    has_residual_bias: bool
    history_frames: int
    zero_leading_frames: int
    weight_layout: str
    tile_w: int
    tile_h: int

    @classmethod
    def from_geometry(
        cls,
        in_channels: int,
        out_channels: int,
        target: Target,
        *,
        epilogue: str,
        has_residual: bool,
        has_residual_bias: bool,
        history_frames: int,
        zero_leading_frames: int,
        output_sites: tuple[int, int, int, int],
        weight_layout: str = OTRSI,
    ) -> Conv3dKernelConfig:
        """Takes the tile with the cheapest waves for ``output_sites``; ties go to the first.

        Args:
            in_channels: Ci, a multiple of 8; 16 with ``weight_layout="taps16"``.
            out_channels: Co, a multiple of 8, and at most 320 where the norm is fused.
            target: what to compile for.
            epilogue: ``raw``, ``norm``, ``norm_pad`` or ``bias_residual_pad``.
            has_residual: a residual is added.
            has_residual_bias: a bias is added to the residual.
            history_frames: planes of ``norm_pad`` whose interior belongs to the caller.
            zero_leading_frames: leading input planes that are never read and count as zero.
            output_sites: ``(N, T, H, W)`` of the valid convolution.
            weight_layout: ``otrsi``, or ``taps16``: 27 taps of 16 channels and a zero tap, for an
                input of 16 channels such as ``padded_input``.
        """
        candidates = [
            cls(
                in_channels,
                out_channels,
                epilogue,
                has_residual,
                has_residual_bias,
                history_frames if epilogue == NORM_PAD else 0,
                zero_leading_frames,
                weight_layout,
                *tile,
            )
            for tiles in TILES.values()
            for tile in tiles
        ]
        served = [config for config in candidates if (config.num_warps, 1) in RATE]
        return min(served, key=lambda config: config.cost(target, output_sites))

    def cost(self, target: Target, output_sites: tuple[int, int, int, int]) -> float:
        """Pixels of the busiest SM, by its relative speed."""
        n, t, h, w = output_sites
        num_tiles = n * t * -(-h // self.tile_h) * -(-w // self.tile_w) * self.num_channel_tiles
        sm_smem_bytes = target.smem_per_cta_bytes + KIB  # each CTA takes 1 KiB more than it asks
        most = min(FULL_SM_THREADS // self.threads, sm_smem_bytes // (smem_bytes(self) + KIB))
        full_waves, last = divmod(-(-num_tiles // target.num_sms), most)
        waves = [(full_waves, most), (1, last)] if last else [(full_waves, most)]
        return sum(
            count * resident * self.tile_pixels / RATE[self.num_warps, resident]
            for count, resident in waves
        )

    @property
    def is_norm(self) -> bool:
        """A pixel's full row of channels is reduced, so a CTA has to hold it."""
        return self.epilogue in (NORM, NORM_PAD)

    @property
    def is_padded(self) -> bool:
        """The output has a border."""
        return self.epilogue not in (RAW, NORM)

    # Output tile.

    @property
    def tile_pixels(self) -> int:
        """Pixels of a CTA."""
        return self.tile_w * self.tile_h

    @property
    def num_channel_tiles(self) -> int:
        """Tiles of output channels per pixel."""
        return 1 if self.is_norm else -(-self.out_channels // MAX_TILE_CHANNELS)

    @property
    def warps_m(self) -> int:
        """Warps along the pixels, 64 each."""
        return self.tile_pixels // (WARP_BLOCKS * BLOCK_PIXELS)

    @property
    def warps_n(self) -> int:
        """Warps along the channels."""
        return 4 if self.is_norm and self.out_channels > MAX_TILE_CHANNELS else 2

    @property
    def num_warps(self) -> int:
        """Warps of a CTA."""
        return self.warps_m * self.warps_n

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARP_THREADS * self.num_warps

    @property
    def warp_channels(self) -> int:
        """Output channels of a warp, at most 80."""
        return -(-self.out_channels // (self.num_channel_tiles * self.warps_n * GROUP)) * GROUP

    @property
    def num_groups(self) -> int:
        """Groups of 16 channels of a warp."""
        return self.warp_channels // GROUP

    @property
    def unrolled_rows(self) -> int:
        """Rows of taps in the body of the main loop.

        With 64 channels of a warp, ptxas spills what it moves out of a loop over single rows on
        sm_100a and its kin.
        """
        return 3 if self.warp_channels == 64 else 1

    @property
    def tile_channels(self) -> int:
        """Output channels of a CTA: a multiple of 32; those past Co are zero."""
        return self.warps_n * self.warp_channels

    @property
    def has_channel_tail(self) -> bool:
        """The last tile of channels reaches past Co."""
        return self.tile_channels * self.num_channel_tiles != self.out_channels

    @property
    def lane_vecs(self) -> int:
        """Vectors of a lane that finishes a pixel with its quad; none is past Co for every lane."""
        return -(-min(self.tile_channels, self.out_channels) // (QUAD * VEC))

    @property
    def blocks_w(self) -> int:
        """Blocks of a warp side by side; the others lie below."""
        return self.tile_w // 8

    # Copies from global memory.

    @property
    def num_chunks(self) -> int:
        """Chunks of input channels."""
        return -(-self.in_channels // CHUNK)

    @property
    def chunk_vecs(self) -> int:
        """16-byte vectors of a chunk's row that are used."""
        return (MMA_K if self.in_channels <= MMA_K else CHUNK) // VEC

    @property
    def copy_rows(self) -> int:
        """Rows that the threads copy at once: a multiple of 16, so swizzle and order repeat."""
        return self.threads // self.chunk_vecs

    @property
    def halo_pitch(self) -> int:
        """Rows of an A stage per row of the halo."""
        return HALO_PITCH[self.tile_w]

    @property
    def halo_rows(self) -> int:
        """Rows of an A stage."""
        return self.halo_pitch * (self.tile_h + 2)

    @property
    def a_copies(self) -> int:
        """Copies per thread of one A stage, one a tap; read when the last is two taps old."""
        copies = -(-self.halo_rows // self.copy_rows)
        assert copies < TAPS_PER_PLANE, f"{copies} copies of A do not fit {TAPS_PER_PLANE} taps"
        return copies

    @property
    def halo_entries(self) -> int:
        """Rows that the copies of an A stage go through, surplus ones included."""
        return self.a_copies * self.copy_rows

    @property
    def b_copies(self) -> int:
        """Copies per thread of one B stage."""
        return -(-self.tile_channels // self.copy_rows)

    @property
    def tap_pitch(self) -> int:
        """Columns of a packed weight from tap to tap."""
        taps16 = self.weight_layout == TAPS16
        return CAUSAL_PADDED_CHANNELS if taps16 else packed_channels(self.in_channels)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the packed weight."""
        if self.weight_layout == TAPS16:
            return (self.out_channels, CAUSAL_PACKED_COLUMNS)
        return (self.out_channels, *KERNEL, self.tap_pitch)

    # Shared memory, in elements.

    @property
    def a_stage(self) -> int:
        """One halo of one chunk."""
        return self.halo_rows * CHUNK

    @property
    def b_stage(self) -> int:
        """One tap of one chunk."""
        return self.tile_channels * CHUNK

    @property
    def pixel_pitch(self) -> int:
        """From pixel to pixel in the epilogue: an odd multiple of 64 bytes, free of conflicts."""
        return (self.tile_channels // CHUNK | 1) * CHUNK

    @property
    def tile_elements(self) -> int:
        """The stages and, in their place, the epilogue's tile."""
        stages = NUM_A_STAGES * self.a_stage + NUM_B_STAGES * self.b_stage
        return max(stages, self.tile_pixels * self.pixel_pitch)

    @property
    def num_vectors(self) -> int:
        """Vectors of the channels: bias, gamma, residual bias."""
        return 0 if self.epilogue == RAW else 3


def smem_bytes(config: Conv3dKernelConfig) -> int:
    """Shared memory of one CTA."""
    elements = config.tile_elements + config.num_vectors * config.tile_channels
    return elements * ELEMENT_BYTES + config.halo_entries * INDEX_BYTES
