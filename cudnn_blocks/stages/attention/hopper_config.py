# SPDX-License-Identifier: Apache-2.0
"""Tiles and compile-time facts of the Hopper SDPA kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudnn_blocks.stages.attention.facts import SdpaFacts

if TYPE_CHECKING:
    from cudnn_blocks.target import Target

MMA_M, MMA_K = 64, 16
CHUNK = 64  # elements of a 128-byte swizzle row
ELEMENT_BYTES = 2
VEC = 8  # elements of one 16-byte access

WARP_THREADS = 32
WARPGROUP_THREADS = 128
CONSUMER_WARPGROUPS = 2
CONSUMER_WARPS = 4 * CONSUMER_WARPGROUPS
CONSUMER_THREADS = WARPGROUP_THREADS * CONSUMER_WARPGROUPS
NUM_THREADS = CONSUMER_THREADS + WARPGROUP_THREADS
LOAD_WARP = CONSUMER_WARPS
TILE_M = MMA_M * CONSUMER_WARPGROUPS  # query rows of a tile, 64 per warpgroup

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # of a thread; 3 x 168 at the launch

SMEM_ALIGN_BYTES = 1024  # of a 128-byte swizzle atom
BARRIER_BYTES = 8
PIN_BYTES = 16

L2_SECTION_BYTES = 32 << 20
"""K and V of the heads that are worked on at a time; they stay in L2."""


@dataclass(frozen=True)
class Tile:
    """How a CTA walks the keys of its 128 query rows."""

    n: int
    """Keys of one block."""
    num_stages: int
    """Blocks of K, and as many of V, in shared memory."""
    prefetches_query: bool
    """The next tile's queries are fetched into L2 before their buffer is free."""
    pins_exponentials: bool
    """A block's exponentials stay ahead of the wait for the product before it."""
    why: str


TILES = {
    64: Tile(128, 2, True, True, "bound by exponentials: 7 % faster pinned"),
    128: Tile(128, 2, False, False, "softmax bound: ptxas' own order is 4 % faster than pinned"),
    256: Tile(80, 2, True, True, "widest block that two stages leave room for; tensor bound"),
}
"""By ``d_head``."""


@dataclass(frozen=True)
class PipelineFacts:
    """What the barriers of one ring of stages count."""

    num_stages: int
    full_bytes: int
    """TMA bytes that fill a stage, from whichever CTA; the load warp's arrival expects them."""
    empty_arrivals: int
    """Consumer warps that release a stage, of every CTA that its load reaches."""


@dataclass(frozen=True)
class SdpaConfig(SdpaFacts):
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    tile: Tile
    cluster: int
    """CTAs that work on as many query heads of one key and value head, and share its blocks."""
    num_clusters: int
    """Clusters of the persistent grid: as many as the device holds."""

    @classmethod
    def from_geometry(cls, target: Target, **facts: Any) -> SdpaConfig:
        """Batch and lengths are not compiled in.

        Args:
            target: what to compile for.
            facts: the fields of SdpaFacts, the mask as the geometry has it.
        """
        common = SdpaFacts(**facts)
        cluster = 2 if common.gqa_ratio % 2 == 0 else 1
        return cls(
            **common.as_compiled(),
            tile=TILES[common.d_head],
            cluster=cluster,
            num_clusters=target.num_sms // cluster,
        )

    @property
    def num_parts(self) -> int:
        """Loops over blocks: masked, not masked, and with a left window masked again."""
        return 3 if self.has_window_left else 2

    @property
    def head_units(self) -> int:
        """Groups of query heads that a cluster works on at a time, of one batch entry."""
        return self.h_q // self.cluster

    @property
    def chunks(self) -> int:
        """64-element chunks of a head."""
        return self.d_head // CHUNK

    @property
    def query_pipeline(self) -> PipelineFacts:
        """One stage per warpgroup, which alone reads it."""
        size = MMA_M * self.d_head * ELEMENT_BYTES
        return PipelineFacts(CONSUMER_WARPGROUPS, size, CONSUMER_WARPS // CONSUMER_WARPGROUPS)

    @property
    def block_pipeline(self) -> PipelineFacts:
        """Blocks of K, or of V, which every CTA of the cluster reads."""
        size = self.tile.n * self.d_head * ELEMENT_BYTES
        return PipelineFacts(self.tile.num_stages, size, CONSUMER_WARPS * self.cluster)


def smem_bytes(config: SdpaConfig) -> int:
    """Shared memory of one CTA, as the kernel lays it out."""
    rings = (config.query_pipeline, config.block_pipeline, config.block_pipeline)
    stages = sum(ring.num_stages * (ring.full_bytes + 2 * BARRIER_BYTES) for ring in rings)
    return stages + PIN_BYTES
