# SPDX-License-Identifier: Apache-2.0
"""Tiles of the Hopper GEMM kernel: a table, and the choice of a row.

The persistent grid works in waves of one tile per CTA, so a launch costs about

    waves(M, N, SMs) * m * n * (K * k_cost + epilogue)

relative to a large tile that only multiplies. A *shared* tile is computed by both consumer
warpgroups, which store it together while the tensor cores wait. In *ping-pong* each warpgroup has
tiles of its own and stores one while the other multiplies the next; its smaller tiles read more
shared memory per product, which long products, run at the power limit anyway, do not feel. The
figures are ratios of interleaved launches on an H200 over the shapes of gated attention.

A last wave of shared tiles that fills at most half the clusters is split: each of its tiles goes to
two clusters, half the rows to each, and counts as half a wave.

The K loop does not depend on any of this: whatever tile is chosen, the bits are the same.
"""

from dataclasses import dataclass

from cudnn_blocks.stages.gemm.epilogues import NormRope

RASTER_GROUP = 16
"""Neighbouring tiles along M that take turns before the next column of tiles: with them and the
columns of one wave, the operands of a wave stay in L2."""
LONG_WAVES = 15
"""Waves of 128 x 256 outputs per SM from which a product counts as long."""
JOINED_COLUMNS = 128
"""Columns of a head of 256 that one CTA of a pair holds."""


@dataclass(frozen=True)
class Tile:
    """The tile of one CTA, and how CTAs share loads and follow each other."""

    m: int
    """64, or a multiple of 128."""
    n: int
    """128 or 256."""
    num_stages: int
    cluster_m: int = 1
    """CTAs with neighbouring rows, which load W for each other."""
    cluster_n: int = 1
    """CTAs with neighbouring columns, which load X for each other."""
    is_pingpong: bool = False
    """Each consumer warpgroup has tiles of its own: one multiplies while the other stores."""
    splits_tail: bool = False
    """A short last wave is split along M."""
    raster_group: int = RASTER_GROUP
    """Tiles of one group along M."""
    k_cost: float = 1.0
    """Time per product relative to the best tile."""
    long_k_cost: float = 1.0
    """The same for a long product."""
    epilogue: float = 90.0
    """Time of what no multiplication hides, in elements of K."""

    @property
    def cluster_size(self) -> int:
        """CTAs that start together."""
        return self.cluster_m * self.cluster_n

    def __str__(self) -> str:
        return self.describe(64)

    def describe(self, k_tile: int) -> str:
        """The tile, with the elements of K that a stage holds."""
        shared = f", cluster {self.cluster_m}x{self.cluster_n}" if self.cluster_size > 1 else ""
        pingpong = ", ping-pong" if self.is_pingpong else ""
        return f"{self.m}x{self.n}x{k_tile} tiles, {self.num_stages} stages{shared}{pingpong}"


TILES = (
    Tile(128, 128, 6, cluster_m=2, is_pingpong=True, k_cost=1.02, epilogue=15),
    Tile(128, 128, 5, cluster_n=2, is_pingpong=True, k_cost=1.02, epilogue=15),
    Tile(128, 256, 4, splits_tail=True),
    Tile(128, 256, 4),
    Tile(64, 128, 8, k_cost=1.35, long_k_cost=1.35),
)
"""The rows; the second holds halves of heads of 256, the fourth whole ones."""
PROMOTED_TILES = (
    Tile(256, 128, 4, cluster_n=2),
    Tile(256, 128, 3, cluster_n=2, k_cost=1.02, long_k_cost=1.02),
    Tile(128, 128, 5, cluster_n=2, k_cost=1.05, long_k_cost=1.05, epilogue=110),
    Tile(128, 128, 6, k_cost=1.08, long_k_cost=1.08, epilogue=110),
    Tile(64, 128, 8, k_cost=1.35, long_k_cost=1.35, epilogue=110),
)
"""Rows whose warpgroups have registers for the sums of an m64 block on their way to FP32; the
second and third leave room for what halves of heads of 256 share. The costs are estimates."""


def serves(tile: Tile, norm_rope: NormRope | None) -> bool:
    """Whether a warpgroup holds whole heads, or halves whose pairs of channels are not apart."""
    if norm_rope is None:
        return True
    if tile.m > 128 and tile.num_stages > 3 and norm_rope.d_head > tile.n:
        return False  # no shared memory left for the norm weights and sums of a pair of CTAs
    is_split = tile.splits_tail or (tile.m == 64 and not tile.is_pingpong)
    columns = tile.n // 2 if is_split else tile.n
    if columns % norm_rope.d_head == 0:
        return True
    is_joined = tile.cluster_n == 2 and 2 * columns == norm_rope.d_head == 2 * JOINED_COLUMNS
    return is_joined and not is_split and norm_rope.rope_dim <= columns


def choose_tile(
    m: int,
    n: int,
    k: int,
    num_sms: int,
    norm_rope: NormRope | None,
    is_promoted: bool = False,
) -> Tile:
    """The cheapest row that serves ``M x N x K``; ties go to the first.

    K counts 16-bit elements. ``is_promoted``: a row of ``PROMOTED_TILES``, else of ``TILES``.
    """
    is_long = m * n >= LONG_WAVES * num_sms * 128 * 256

    def time(tile: Tile) -> float:
        num_clusters = num_sms // tile.cluster_size
        units = _ceil_div(m, tile.m * tile.cluster_m) * _ceil_div(n, tile.n * tile.cluster_n)
        waves, rest = divmod(units, num_clusters)
        last = 0.5 if tile.splits_tail and 2 * rest <= num_clusters else 1.0
        depth = k * (tile.long_k_cost if is_long else tile.k_cost) + tile.epilogue
        return (waves + (last if rest else 0.0)) * tile.m * tile.n * depth

    rows = PROMOTED_TILES if is_promoted else TILES
    return min((tile for tile in rows if serves(tile, norm_rope)), key=time)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
