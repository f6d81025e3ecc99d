# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the Hopper causal convolution, and its tiles."""

from dataclasses import dataclass

from cudnn_blocks.target import Target

CHANNELS = 16  # of a packed pixel: one wgmma K block, one 32-byte swizzle row
OUT_CHANNELS = 160
PACKED_COLUMNS = 448  # 27 taps and a zero tap
PLANES, TAPS_PER_PLANE = 3, 9
TAPS = PLANES * TAPS_PER_PLANE
HALO = 2  # rows and columns of input beyond a tile's outputs
ELEMENT_BYTES = 2
VEC = 8  # channels of one 16-byte store
GROUPS = OUT_CHANNELS // 32  # a thread owns 8 consecutive channels of each

WARP_THREADS = 32
WARPGROUP_THREADS = 128
WARPGROUP_WARPS = 4
CONSUMER_WARPGROUPS = 2
NUM_THREADS = WARPGROUP_THREADS * (CONSUMER_WARPGROUPS + 1)
LOAD_WARP = WARPGROUP_WARPS * CONSUMER_WARPGROUPS
TURN_THREADS = CONSUMER_WARPGROUPS * WARPGROUP_THREADS
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # within the 3 x 168 of the launch

BLOCK_SIDE = 8  # a wgmma row block is 8 x 8 pixels
BLOCK_PIXELS = 64
SMEM_ALIGN_BYTES = 1024
BARRIER_BYTES = 8
TAP_BYTES = OUT_CHANNELS * CHANNELS * ELEMENT_BYTES
NUM_STAGES = 4

WEIGHT_BOX = (CHANNELS, 2, 4, 4, GROUPS)
"""(C, E, Q, J, G): filter ``32 G + 8 Q + 2 J + E``; a thread accumulates 8 adjacent channels."""


@dataclass(frozen=True)
class PixelTile:
    """Output pixels of a warpgroup's tile; both sides are multiples of 8."""

    width: int
    height: int
    cost: float
    """Time per pixel relative to the first row, measured on an H200 at 4 x 352 x 640."""


PIXEL_TILES = (PixelTile(8, 16, 1.00), PixelTile(16, 8, 1.06))


@dataclass(frozen=True)
class CausalConvConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    zero_leading_frames: int
    """Frames of ``padded_input`` known to be zero: 2 without history."""
    tile: PixelTile
    num_ctas: int
    num_stages: int = NUM_STAGES

    @classmethod
    def from_geometry(
        cls,
        target: Target,
        *,
        zero_leading_frames: int,
        output_sites: tuple[int, int, int, int],
    ) -> "CausalConvConfig":
        """Takes the tile with the cheapest waves for ``output_sites``, ``(N, T, H, W)``."""
        n, t, h, w = output_sites

        def cost(tile: PixelTile) -> float:
            num_tiles = n * t * -(-h // tile.height) * -(-w // tile.width)
            return -(-num_tiles // (CONSUMER_WARPGROUPS * target.num_sms)) * tile.cost

        return cls(zero_leading_frames, min(PIXEL_TILES, key=cost), target.num_sms)

    @property
    def blocks(self) -> int:
        """m64 blocks of a tile."""
        return self.tile.width * self.tile.height // BLOCK_PIXELS

    @property
    def blocks_per_row(self) -> int:
        """m64 blocks along W."""
        return self.tile.width // BLOCK_SIDE

    @property
    def halo_box(self) -> tuple[int, ...]:
        """(C, W, H, T, N)."""
        return (CHANNELS, self.tile.width + HALO, self.tile.height + HALO, PLANES, 1)

    @property
    def halo_bytes(self) -> int:
        """Bytes that one load brings."""
        c, w, h, t, _ = self.halo_box
        return c * w * h * t * ELEMENT_BYTES

    @property
    def stage_bytes(self) -> int:
        """Distance of stages."""
        return -(-self.halo_bytes // SMEM_ALIGN_BYTES) * SMEM_ALIGN_BYTES


def smem_bytes(config: CausalConvConfig) -> int:
    """Shared memory of one CTA."""
    barriers = 2 * config.num_stages + 1
    return TAPS * TAP_BYTES + config.num_stages * config.stage_bytes + barriers * BARRIER_BYTES
