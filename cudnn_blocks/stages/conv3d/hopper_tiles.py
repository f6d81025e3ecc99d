# SPDX-License-Identifier: Apache-2.0
"""Tiles of the Hopper Conv3D kernel: two tables, and the choice between their combinations.

A CTA computes ``width x height`` output pixels of one frame times ``n_tile`` output channels, and
the persistent grid works in waves of one tile per CTA. A launch therefore costs about

    waves(sites, SMs) * width * height * n_tile * cost

with a cost per element that was measured (H200, ratios on the VAE encoder's shapes).
The K loop does not depend on any of this: whatever tile is chosen, the bits are the same.
"""

from dataclasses import dataclass

from cudnn_blocks.stages.conv3d.epilogues import NORM, NORM_PAD, RAW

IN_CHANNEL_MULTIPLE = 32
"""Input channels that were compiled and run are multiples of this."""
MAX_TILE_ELEMENTS = 256 * 160
"""Pixels times channels of a tile: 160 FP32 accumulators a thread leave registers for the rest."""


@dataclass(frozen=True)
class ChannelTile:
    """How the output channels of a pixel are spread over CTAs and passes."""

    n_tile: int
    """Output channels of one CTA: a multiple of 32 up to 256, the N of its wgmma."""
    norm_cluster_n: int | None
    """CTAs that hold one pixel's channels and reduce its norm together; None: too wide to fuse."""


CHANNEL_TILES = {
    160: ChannelTile(160, 1),
    320: ChannelTile(160, 2),
    640: ChannelTile(160, None),
    # Beyond the 160 family: correct, and never tuned.
    96: ChannelTile(96, 1),
    192: ChannelTile(96, 2),
    384: ChannelTile(192, 2),
    128: ChannelTile(128, 1),
    256: ChannelTile(128, 2),
    512: ChannelTile(128, None),
}
"""Output channels that the kernel serves."""

NARROW_N_TILE = 32
"""Channels of a CTA of a raw convolution whose pixels alone would leave most SMs idle."""
NARROW_COST = 1.6
"""Its time per element, relative to a full tile: every channel group reads the pixels again."""


@dataclass(frozen=True)
class PixelTile:
    """Output pixels of a CTA; both sides are multiples of 8."""

    width: int
    height: int
    num_halo_stages: int
    raw_cluster_m: int
    """CTAs of a raw convolution that share each weight stage by multicast."""
    raw_cost: float
    fused_cost: float
    """Time per pixel relative to the 16 x 16 tile, per kind of epilogue."""
    why: str


PIXEL_TILES = (
    PixelTile(16, 16, 2, 1, 1.00, 1.00, "smallest halo; tiles 352x640 and 176x320 exactly"),
    PixelTile(32, 8, 2, 1, 1.00, 1.00, "tiles 88 rows exactly, where 16 x 16 wastes 8 %"),
    PixelTile(16, 8, 3, 2, 1.03, 1.06, "half the quantum: a short last wave costs less"),
)


@dataclass(frozen=True)
class TileChoice:
    """The tile of one specialisation."""

    width: int
    height: int
    n_tile: int
    num_halo_stages: int
    cluster_m: int
    """CTAs with neighbouring pixel tiles; they share weight stages."""
    cluster_n: int
    """CTAs with neighbouring channels of one pixel tile; they share halo stages and row norms."""

    def __str__(self) -> str:
        cluster = self.cluster_m * self.cluster_n
        shared = f", cluster of {cluster}" if cluster > 1 else ""
        return f"{self.width}x{self.height} pixels x {self.n_tile} channels{shared}"


def serves_norm(out_channels: int) -> bool:
    """True where the normalisation can be fused."""
    row = CHANNEL_TILES.get(out_channels)
    return row is not None and row.norm_cluster_n is not None


NORM_OUT_CHANNELS = tuple(channels for channels in CHANNEL_TILES if serves_norm(channels))
"""Output channels that the fused normalisation serves."""


def choose_tile(
    out_channels: int, epilogue: str, output_sites: tuple[int, int, int, int], num_sms: int
) -> TileChoice:
    """The cheapest tile for ``output_sites``, (N, T, H, W).

    Among equals the one that computes fewest pixels past the edges, as energy limits the clock;
    then the first.
    """
    n, t, h, w = output_sites

    def cost(candidate: tuple[TileChoice, float]) -> tuple[float, int]:
        tile, cost_per_element = candidate
        cluster = tile.cluster_m * tile.cluster_n
        num_tiles = n * t * _ceil_div(h, tile.height) * _ceil_div(w, tile.width)
        num_tiles *= out_channels // tile.n_tile
        waves = _ceil_div(num_tiles, num_sms // cluster * cluster)
        elements = tile.width * tile.height * tile.n_tile
        return waves * elements * cost_per_element, num_tiles * elements

    return min(candidates(out_channels, epilogue), key=cost)[0]


def candidates(out_channels: int, epilogue: str) -> list[tuple[TileChoice, float]]:
    """Every tile that serves an epilogue, with its cost per pixel and channel."""
    is_raw, is_norm = epilogue == RAW, epilogue in (NORM, NORM_PAD)
    channels = CHANNEL_TILES[out_channels]
    cluster_n = channels.norm_cluster_n if is_norm else 1
    assert cluster_n is not None, f"{epilogue} of {out_channels} channels is not served"
    spreads = [(channels.n_tile, 1.0)]
    if is_raw and channels.n_tile > NARROW_N_TILE:
        spreads.append((NARROW_N_TILE, NARROW_COST))
    return [
        (
            TileChoice(
                width=row.width,
                height=row.height,
                n_tile=n_tile,
                num_halo_stages=row.num_halo_stages,
                cluster_m=row.raw_cluster_m if is_raw else 1,
                cluster_n=cluster_n,
            ),
            spread_cost * (row.raw_cost if is_raw else row.fused_cost),
        )
        for n_tile, spread_cost in spreads
        for row in PIXEL_TILES
        if row.width * row.height * n_tile <= MAX_TILE_ELEMENTS
    ]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
