# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the Hopper GEMM kernel."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudnn_blocks.stages.gemm.epilogues import NormRope, OperandTypes, element_bytes
from cudnn_blocks.stages.gemm.hopper_tiles import JOINED_COLUMNS, Tile, choose_tile

if TYPE_CHECKING:
    from cudnn_blocks.target import Target

OUTPUT_BYTES = 2
FLOAT_BYTES = 4
ROW_BYTES = 128  # of K in a stage: a swizzle row
MMA_K_BYTES = 32
MMA_M = 64

WARP_THREADS = 32
WARPGROUP_THREADS = 128
WARPGROUP_WARPS = 4
CONSUMER_WARPGROUPS = 2
CONSUMER_WARPS = WARPGROUP_WARPS * CONSUMER_WARPGROUPS
CONSUMER_THREADS = WARPGROUP_THREADS * CONSUMER_WARPGROUPS
NUM_THREADS = WARPGROUP_THREADS * (CONSUMER_WARPGROUPS + 1)
LOAD_WARP = CONSUMER_WARPS

PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240  # with the producers' within the 3 x 168 of the launch

WARP_ROWS = 16  # rows of an m64 block that one warp holds
STORE_COLUMNS = 64  # columns of one TMA store: whole 128-byte lines
STORE_BUFFERS = 2

SUM_COLUMNS = JOINED_COLUMNS
"""Columns of a head that are summed as one. A head of 256 is two sums, whether one CTA holds it or
two, so that its norm has the same bits in every tile."""
SUM_SLOTS = 2
"""Tiles whose sums may be on their way between two CTAs."""
MAX_PREFETCHED_TABLE = 64
"""Rotated channels whose cosines and sines wait in registers from before the mainloop."""

SMEM_ALIGN_BYTES = 1024  # of a 128-byte swizzle atom
BARRIER_BYTES = 8


@dataclass(frozen=True)
class Fragment:
    """What one consumer warpgroup holds of a CTA tile."""

    blocks: int
    """m64 blocks; block ``b`` of warpgroup ``w`` is the tile's ``b * warpgroups_m + w``-th."""
    columns: int
    warpgroups_m: int = 1
    warpgroups_n: int = 1
    """Warpgroups that share a tile; where it is one, the other has a tile of its own."""

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a tile."""
        return self.warpgroups_m * self.warpgroups_n

    @property
    def rows(self) -> int:
        """Rows of the CTA tile."""
        return MMA_M * self.blocks * self.warpgroups_m


@dataclass(frozen=True)
class GemmKernelConfig(OperandTypes):
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    dtype: str
    """Of x and w."""
    tile: Tile
    norm_rope: NormRope | None
    """QK-norm and RoPE of the projection slab, or None for a plain product."""
    num_clusters: int
    """Clusters of the persistent grid: as many as the device holds."""
    promote_every: int = 0
    """Stages of K after which the tensor cores' sums go into FP32 registers; 0 for never."""
    has_alpha: bool = False

    @classmethod
    def from_geometry(
        cls,
        m: int,
        n: int,
        k: int,
        target: "Target",
        *,
        dtype: str,
        norm_rope: NormRope | None = None,
        promote_every: int = 0,
        has_alpha: bool = False,
    ) -> "GemmKernelConfig":
        """Chooses the tile for the largest ``M x N x K``; the extents themselves are dynamic."""
        depth = k * element_bytes(dtype) // OUTPUT_BYTES  # as long as so much K of 16-bit elements
        tile = choose_tile(m, n, depth, target.num_sms, norm_rope, promote_every > 0)
        num_clusters = target.num_sms // tile.cluster_size
        return cls(dtype, tile, norm_rope, num_clusters, promote_every, has_alpha)

    # The tile.

    @property
    def fragment(self) -> Fragment:
        """Of a whole tile."""
        tile = self.tile
        if tile.is_pingpong:
            return Fragment(tile.m // MMA_M, tile.n)
        if tile.m == MMA_M:
            return self.half_fragment
        blocks = tile.m // (MMA_M * CONSUMER_WARPGROUPS)
        return Fragment(blocks, tile.n, warpgroups_m=CONSUMER_WARPGROUPS)

    @property
    def half_fragment(self) -> Fragment:
        """Of 64 rows that both warpgroups share."""
        columns = self.tile.n // CONSUMER_WARPGROUPS
        return Fragment(1, columns, warpgroups_n=CONSUMER_WARPGROUPS)

    # Pipeline.

    @property
    def k_tile(self) -> int:
        """Elements of K in a stage."""
        return ROW_BYTES // element_bytes(self.dtype)

    @property
    def stage_bytes(self) -> int:
        """TMA bytes that fill a stage, from whichever CTA; the load warp's arrival expects them."""
        return (self.tile.m + self.tile.n) * ROW_BYTES

    @property
    def empty_arrivals(self) -> int:
        """One per warp that reads a stage, in every CTA that the loads of either operand reach."""
        warps = WARPGROUP_WARPS * self.fragment.warpgroups
        return warps * (self.tile.cluster_m + self.tile.cluster_n - 1)

    # Epilogue.

    @property
    def prefetches_tables(self) -> bool:
        """Cosines and sines are loaded before the mainloop and wait in registers.

        In ping-pong the other warpgroup's products hide their latency; where sums are promoted, two
        blocks leave no registers.
        """
        facts, is_promoted = self.norm_rope, self.promote_every > 0
        if facts is None or self.tile.is_pingpong or (is_promoted and self.fragment.blocks > 1):
            return False
        return 0 < facts.rope_dim <= MAX_PREFETCHED_TABLE

    @property
    def joins_heads(self) -> bool:
        """Two CTAs hold halves of one head; the first one has all channels that rotate."""
        return self.norm_rope is not None and self.norm_rope.d_head > self.fragment.columns

    @property
    def exchanges_sums(self) -> bool:
        """They show each other their sums of squares."""
        return self.joins_heads and self.norm_rope.has_norm

    @property
    def weight_elements(self) -> int:
        """FP32 norm weights of Q and K."""
        facts = self.norm_rope
        return 2 * facts.d_head if facts is not None and facts.has_norm else 0

    @property
    def sum_elements(self) -> int:
        """FP32 sums of squares that the other CTA sends."""
        return CONSUMER_WARPGROUPS * SUM_SLOTS * self.tile.m if self.exchanges_sums else 0

    @property
    def sum_barriers(self) -> int:
        """One per warpgroup and slot."""
        return CONSUMER_WARPGROUPS * SUM_SLOTS if self.exchanges_sums else 0


def smem_bytes(config: GemmKernelConfig) -> int:
    """Shared memory of one CTA, as ``GemmKernel.allocate`` lays it out."""
    staging = CONSUMER_WARPS * STORE_BUFFERS * WARP_ROWS * STORE_COLUMNS * OUTPUT_BYTES
    floats = config.weight_elements + config.sum_elements
    barriers = 2 * config.tile.num_stages + config.sum_barriers
    stages = config.tile.num_stages * config.stage_bytes
    return stages + staging + floats * FLOAT_BYTES + barriers * BARRIER_BYTES
