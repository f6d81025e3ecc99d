# SPDX-License-Identifier: Apache-2.0
"""Tiles and compile-time facts of the Hopper SDPA kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudnn_blocks.stages.attention.facts import SdpaFacts

if TYPE_CHECKING:
    from cudnn_blocks.target import Target

MMA_M = 64
MMA_K_BYTES = 32
SWIZZLE_BYTES = 128  # of a row at most
VEC = 8  # channels that one thread loads or stores at once; strides are multiples of it

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
    64: Tile(128, 2, True, False, "bound by exponentials: 6 % faster in ptxas' own order"),
    128: Tile(128, 2, False, False, "softmax bound: ptxas' own order is 4 % faster than pinned"),
    256: Tile(80, 2, True, True, "widest block that two stages leave room for; tensor bound"),
}
"""By ``d_head``."""
FP8_TILES = {
    64: Tile(128, 2, True, True, "bound by exponentials"),
    128: Tile(128, 2, True, True, "bound by exponentials"),
    256: Tile(128, 2, True, True, "as many products per exponential as BF16 of 128 channels"),
}
"""By ``d_head``, of e4m3 codes: a block of values is whole 128-byte rows of keys."""


@dataclass(frozen=True)
class Panel:
    """What of an operand fills a stage: ``rows`` of ``columns`` that are neighbours in memory."""

    rows: int
    columns: int
    chunk: int
    """Columns of a swizzled row."""
    advances_rows: bool = True
    """The next block has other rows; else it has other columns."""

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.columns // self.chunk

    @property
    def size(self) -> int:
        """Elements."""
        return self.rows * self.columns


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
            tile=(FP8_TILES if common.is_fp8 else TILES)[common.d_head],
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
    def mma_k(self) -> int:
        """Elements that one product sums over."""
        return MMA_K_BYTES // self.element_bytes

    @property
    def query_panel(self) -> Panel:
        """Rows of a warpgroup."""
        return self._rows(MMA_M)

    @property
    def key_panel(self) -> Panel:
        """A block of K."""
        return self._rows(self.tile.n)

    @property
    def value_panel(self) -> Panel:
        """A block of V; of codes it is transposed."""
        if self.is_fp8:
            return Panel(self.d_head, self.tile.n, SWIZZLE_BYTES, advances_rows=False)
        return self._rows(self.tile.n)

    def _rows(self, count: int) -> Panel:
        chunk = min(SWIZZLE_BYTES // self.element_bytes, self.d_head)
        return Panel(count, self.d_head, chunk)

    @property
    def clears_tail(self) -> bool:
        """Values past the length may be anything; transposed ones are zeros already."""
        return self.has_seq_lens and not self.is_fp8

    @property
    def is_short_of_registers(self) -> bool:
        """256 channels and 128 keys leave the softmax next to a product few for anything else."""
        return self.d_head + self.tile.n > 336

    @property
    def weight_bits(self) -> int:
        """Log2 of the probability that the reference maximum of a row gets."""
        return 8 if self.is_fp8 else 0

    @property
    def max_growth(self) -> float:
        """Log2 of what a probability may exceed that by: BF16 and FP16 have room, 448 / 256 not."""
        return 0.75 if self.is_fp8 else 8.0

    @property
    def max_exponent_bits(self) -> int:
        """Log2 of the largest ``max * c``; what it is rounded by is little to the growth above."""
        return 20 if self.is_fp8 else 26

    def scratch_bytes(self, batch: int, num_keys: int) -> int:
        """The transposed values of e4m3 codes: ``[B, h_kv, D, Sk]`` with Sk to whole blocks."""
        padded = -(-num_keys // self.tile.n) * self.tile.n
        return batch * self.h_kv * self.d_head * padded if self.is_fp8 else 0

    @property
    def query_pipeline(self) -> PipelineFacts:
        """One stage per warpgroup, which alone reads it."""
        size = self.query_panel.size * self.element_bytes
        return PipelineFacts(CONSUMER_WARPGROUPS, size, CONSUMER_WARPS // CONSUMER_WARPGROUPS)

    @property
    def block_pipeline(self) -> PipelineFacts:
        """Blocks of K, or of V, which every CTA of the cluster reads."""
        size = self.key_panel.size * self.element_bytes
        return PipelineFacts(self.tile.num_stages, size, CONSUMER_WARPS * self.cluster)


def smem_bytes(config: SdpaConfig) -> int:
    """Shared memory of one CTA, as the kernel lays it out."""
    rings = (config.query_pipeline, config.block_pipeline, config.block_pipeline)
    stages = sum(ring.num_stages * (ring.full_bytes + 2 * BARRIER_BYTES) for ring in rings)
    return stages + PIN_BYTES
