# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the product of few rows with e2m1 weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudnn_blocks.stages.dequant_gemm.portable_layout import (
    ACTIVATION_BYTES,
    BLOB_TILE,
    FLOAT_BYTES,
    PREFETCH_BYTES,
    STEP,
    VECTOR_BYTES,
    WARP_THREADS,
    ceil_div,
)

if TYPE_CHECKING:
    from cudnn_blocks.target import Target

TILE_ROWS = 8
"""Weight rows of a tile, neighbours: the 8-column side of a matrix instruction."""
SLICES = 8
"""Parts of K, a warp's each: step ``i`` belongs to slice ``i % SLICES``."""
THREADS = SLICES * WARP_THREADS
STEP_BYTES = STEP // 2
WORD_BYTES = 4

TOKENS = (8, 16, 32)
MAX_PASS_STEPS = 2
MAX_UNROLLED = 2
ENTRY_BYTES = 256
"""From one code of the table to the next; the second half is a hole for weights on their way."""
TABLE_BYTES = 256 * ENTRY_BYTES
HOLE_SLOTS = TABLE_BYTES // 2 // (THREADS * VECTOR_BYTES)
"""Units of all warps that the holes of the table have room for."""
MIN_DEPTH, MAX_DEPTH = 4, 16
PAIRED_TOKENS = 8
"""Tokens up to which room on the SM for a CTA of the next grid is worth its registers."""
RESERVED_BYTES = 1024
"""Shared memory of every CTA that is not its own."""
SPLIT_RATIO = 6
"""Of bytes of x to bytes of codes that an SM reads: beyond it, x is shared in pairs of SMs."""


@dataclass(frozen=True)
class E2m1DecodeConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    block_size: int
    """Elements under a scale: 32 with E8M0 scales, 16 with e4m3."""
    tokens: int
    """Rows of x of a CTA: 8, 16 or 32."""
    clusters: int
    """Along N; they share all tiles, one more or less each."""
    tiles: int
    """The most of a cluster."""
    splits: int
    """CTAs of a cluster (sm_90 and newer), which share K; 1 or 2."""
    pass_steps: int
    """Steps of K of a warp whose x is in registers at once."""
    passes: int
    """Over all tiles, for all steps of a warp."""
    depth: int
    """Tiles of a warp whose codes are on their way at once, for the steps of a pass."""
    ctas_per_sm: int
    """2 leaves room for a CTA of the next grid."""
    is_ragged: bool
    """A step reaches past K."""
    is_whole: bool
    """All tiles and steps of all passes exist."""
    use_pdl: bool

    @classmethod
    def from_geometry(
        cls, m: int, n: int, k: int, target: "Target", *, block_size: int
    ) -> "E2m1DecodeConfig":
        """Chooses for the largest ``M``; N and K are those of every call."""
        tokens = next((size for size in TOKENS if m <= size), TOKENS[-1])
        token_tiles = ceil_div(max(m, 1), tokens)
        all_tiles = ceil_div(n, BLOB_TILE) * (BLOB_TILE // TILE_ROWS)
        steps = ceil_div(k, STEP)
        x_to_codes = tokens * ACTIVATION_BYTES * target.num_sms / (n / 2)
        is_shared = target.sm >= 90 and steps >= 2 * SLICES and x_to_codes > SPLIT_RATIO
        splits = 2 if is_shared else 1
        # Registers have room for one step's x of 32 tokens beside addresses in two CTAs.
        most = MAX_PASS_STEPS if tokens * splits <= TOKENS[-1] else 1
        pass_steps = min(ceil_div(steps, SLICES), most)
        passes = ceil_div(steps, SLICES * pass_steps)
        is_whole = n % BLOB_TILE == 0 and k % (STEP * SLICES * pass_steps) == 0
        places = max(target.num_sms // splits // token_tiles, 1)

        tile_bytes = SLICES // splits * tokens * TILE_ROWS * FLOAT_BYTES
        most_tiles = (target.smem_per_cta_bytes - TABLE_BYTES) // tile_bytes

        def choices() -> Iterator[E2m1DecodeConfig]:
            for waves in range(ceil_div(all_tiles, places * most_tiles), all_tiles + 1):
                clusters = min(all_tiles, places * waves)
                tiles = ceil_div(all_tiles, clusters)
                wanted = min(ceil_div(tiles, splits) * passes, MAX_DEPTH)
                for ctas_per_sm in (2, 1) if tokens <= PAIRED_TOKENS else (1,):
                    for depth in range(wanted, min(wanted, MIN_DEPTH) - 1, -1):
                        yield cls(
                            block_size,
                            tokens,
                            clusters,
                            tiles,
                            splits,
                            pass_steps,
                            passes,
                            depth,
                            ctas_per_sm,
                            k % STEP != 0,
                            is_whole,
                            target.sm >= 90,
                        )

        return next(config for config in choices() if config.fits(target))

    def fits(self, target: "Target") -> bool:
        """There is shared memory for as many CTAs; two have theirs in the table's holes."""
        if self.ctas_per_sm == 1:
            return smem_bytes(self) <= target.smem_per_cta_bytes
        half = (target.smem_per_cta_bytes + RESERVED_BYTES) // 2 - RESERVED_BYTES
        return self.slots <= HOLE_SLOTS and smem_bytes(self) <= half

    @property
    def row_groups(self) -> int:
        """Warps of a CTA that have the same slice of K, and every such tile."""
        return self.splits

    @property
    def slices(self) -> int:
        """Of a CTA."""
        return SLICES // self.splits

    @property
    def slots(self) -> int:
        """Units of a warp on their way at once."""
        return self.depth * self.pass_steps

    @property
    def m_tiles(self) -> int:
        """Matrix instructions along the tokens."""
        return ceil_div(self.tokens, 16)

    @property
    def halves(self) -> int:
        """8-token halves of a matrix instruction that have tokens."""
        return min(self.tokens // 8, 2)

    @property
    def scale_words(self) -> int:
        """32-bit words of 4 scales for a row and step."""
        return STEP // self.block_size // 4

    @property
    def is_mx(self) -> bool:
        """Scales are powers of two."""
        return self.block_size == 32

    @property
    def is_turned(self) -> bool:
        """CTAs read x from different places on; else all SMs want the same lines at once."""
        return self.tokens >= 16

    @property
    def unrolled_passes(self) -> int:
        """Passes whose code is written out one after the other; a loop where there are many."""
        return self.passes if self.passes <= MAX_UNROLLED else 1

    @property
    def prefetches(self) -> bool:
        """A CTA asks for all its codes ahead."""
        pass_bytes = self.pass_steps * self.slices * STEP_BYTES
        code_bytes = self.tiles * TILE_ROWS * self.passes * pass_bytes
        return self.use_pdl and self.ctas_per_sm == 2 and code_bytes <= PREFETCH_BYTES

    @property
    def refetches(self) -> bool:
        """A warp has more tiles than places for them."""
        return ceil_div(self.tiles, self.row_groups) * self.passes > self.depth

    @property
    def part_pitch(self) -> int:
        """Floats from token to token of a warp's sums: an odd number of tiles has no conflicts."""
        return (self.tiles + (self.tiles + 1) % 2) * TILE_ROWS

    def first_tile(self, cluster: Any, all_tiles: Any, minimum: Callable[..., Any] = min) -> Any:
        """Of a cluster; the next one's is the one past its last. The first ones have one more."""
        rest = all_tiles % self.clusters
        return cluster * (all_tiles // self.clusters) + minimum(cluster, rest)

    def __str__(self) -> str:
        rows = f"{self.tiles * TILE_ROWS} rows x {self.tokens} tokens"
        shared = f", cluster of {self.splits} along K" if self.splits > 1 else ""
        return f"{rows}, {SLICES} warps by a table{shared}"


def beyond_bytes(config: E2m1DecodeConfig) -> int:
    """Bytes of the units that are in no hole."""
    return max(config.slots - HOLE_SLOTS, 0) * THREADS * VECTOR_BYTES


def scale_bytes(config: E2m1DecodeConfig) -> int:
    """Bytes of scales on their way."""
    return config.slots * THREADS * WORD_BYTES


def sums_bytes(config: E2m1DecodeConfig) -> int:
    """Bytes of the sums of every slice."""
    return config.slices * config.tokens * config.part_pitch * FLOAT_BYTES


def smem_bytes(config: E2m1DecodeConfig) -> int:
    """Shared memory of one CTA: the table with its holes, other units, scales and sums."""
    return TABLE_BYTES + beyond_bytes(config) + scale_bytes(config) + sums_bytes(config)
