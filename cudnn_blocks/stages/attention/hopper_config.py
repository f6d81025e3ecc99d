# SPDX-License-Identifier: Apache-2.0
"""Tiles and compile-time facts of the Hopper SDPA kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
MAX_WINDOW = 2**29
"""A window that shows every key of up to 2**29; larger ones are cut to it."""


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
class SdpaConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    dtype: str
    """``bf16`` or ``fp16``."""
    h_q: int
    h_kv: int
    d_head: int
    is_causal: bool
    causal_bottom_right: bool
    window_left: int
    """Keys shown left of the diagonal; -1 for all."""
    window_right: int
    """Keys shown right of a causal diagonal, 0 and up; 0 where the mask is not causal."""
    has_gate: bool
    has_lse: bool
    has_seq_lens: bool
    tile: Tile
    cluster: int
    """CTAs that work on as many query heads of one key and value head, and share its blocks."""
    num_clusters: int
    """Clusters of the persistent grid: as many as the device holds."""

    @classmethod
    def from_geometry(
        cls,
        target: Target,
        *,
        dtype: str,
        h_q: int,
        h_kv: int,
        d_head: int,
        is_causal: bool,
        causal_bottom_right: bool,
        window_left: int,
        window_right: int,
        has_gate: bool,
        has_lse: bool,
        has_seq_lens: bool,
    ) -> SdpaConfig:
        """The same arguments as the portable kernel's; batch and lengths are not compiled in.

        Args:
            target: what to compile for.
            dtype: ``bf16`` or ``fp16``.
            h_q: query heads.
            h_kv: key and value heads; divides ``h_q``.
            d_head: 64, 128 or 256.
            is_causal: no key past the diagonal and ``window_right``.
            causal_bottom_right: the diagonal ends in the last key.
            window_left: keys shown left of the diagonal, -1 for all.
            window_right: keys shown right of a causal diagonal, -1 and 0 for none.
            has_gate: the output is multiplied by the sigmoid of a gate.
            has_lse: the log-sum-exp of every row is stored.
            has_seq_lens: the keys of each batch entry are bounded.
        """
        cluster = 2 if h_q // h_kv % 2 == 0 else 1
        return cls(
            dtype=dtype,
            h_q=h_q,
            h_kv=h_kv,
            d_head=d_head,
            is_causal=is_causal,
            causal_bottom_right=is_causal and causal_bottom_right,
            window_left=min(window_left, MAX_WINDOW),
            window_right=min(max(window_right, 0), MAX_WINDOW) if is_causal else 0,
            has_gate=has_gate,
            has_lse=has_lse,
            has_seq_lens=has_seq_lens,
            tile=TILES[d_head],
            cluster=cluster,
            num_clusters=target.num_sms // cluster,
        )

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share one key and value head."""
        return self.h_q // self.h_kv

    @property
    def has_window_left(self) -> bool:
        """Keys far to the left are hidden."""
        return self.window_left >= 0

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
