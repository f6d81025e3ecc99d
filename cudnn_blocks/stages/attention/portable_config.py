# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the portable SDPA kernel; its table of tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudnn_blocks.stages.attention.facts import SdpaFacts

if TYPE_CHECKING:
    from cudnn_blocks.target import Target

KIB = 1024
FIRST_SM_WITH_E4M3 = 89
OUT_BYTES = 2  # of a finished channel in shared memory
WARP_THREADS = 32
VEC = 8
"""16-bit elements of one 16-byte access."""
MMA_M, MMA_N, MMA_K = 16, 8, 16


@dataclass(frozen=True)
class Tile:
    """Query rows, keys of one step, warps and key stages of a CTA."""

    m: int
    n: int
    num_warps: int
    num_stages: int
    """1: K and V are copied in turn, each under the other's product. 2: a whole step ahead."""


TILES = {
    64: ((Tile(128, 64, 4, 2), 2),),
    128: (
        (Tile(128, 64, 4, 2), 2),
        (Tile(128, 64, 4, 1), 2),
        (Tile(64, 64, 4, 1), 2),
    ),
    256: (
        (Tile(128, 64, 8, 2), 1),
        (Tile(128, 64, 8, 1), 1),
        (Tile(64, 64, 4, 1), 1),
    ),
}
"""By ``d_head``, the preferred tile first: a tile, and how many CTAs of it an SM has to hold. The
order is an estimate."""

FP8_TILES = {
    64: TILES[64],
    128: ((Tile(128, 64, 8, 2), 1),),
    256: TILES[256],
}
"""The same of e4m3 codes, which take registers on their way to the product."""


@dataclass(frozen=True)
class SdpaPortableConfig(SdpaFacts):
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    tile: Tile
    use_pdl: bool
    has_cvt: bool
    """The target converts FP32 to e4m3; only told apart where there are codes."""

    @classmethod
    def from_geometry(cls, target: Target, **facts: Any) -> SdpaPortableConfig:
        """Takes the first tile of the table of which the target holds enough CTAs.

        Args:
            target: what to compile for.
            facts: the fields of SdpaFacts, the mask as the geometry has it.
        """
        common = SdpaFacts(**facts)
        sm_bytes = target.smem_per_cta_bytes + KIB  # each CTA takes 1 KiB more than it asks
        tile = next(
            tile
            for tile, ctas in (FP8_TILES if common.is_fp8 else TILES)[common.d_head]
            if ctas * (tile_smem_bytes(tile, common) + KIB) <= sm_bytes
        )
        return cls(
            **common.as_compiled(),
            tile=tile,
            use_pdl=target.sm >= 90,
            has_cvt=common.is_fp8 and target.sm >= FIRST_SM_WITH_E4M3,
        )

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARP_THREADS * self.tile.num_warps

    @property
    def warp_rows(self) -> int:
        """Query rows of a warp: 16 or 32."""
        return self.tile.m // self.tile.num_warps

    @property
    def warp_blocks(self) -> int:
        """m16 blocks of a warp."""
        return self.warp_rows // MMA_M

    @property
    def row_width(self) -> int:
        """16-bit elements of one row of a head of q, k or v; two codes are one."""
        return self.d_head * self.element_bytes // 2

    @property
    def row_vecs(self) -> int:
        """16-byte vectors of one such row."""
        return self.row_width // VEC

    @property
    def out_vecs(self) -> int:
        """16-byte vectors of one finished row."""
        return self.d_head // VEC

    @property
    def copy_rows(self) -> int:
        """Rows that all threads copy at once."""
        return self.threads // self.row_vecs

    @property
    def q_elements(self) -> int:
        """16-bit elements of the tile of queries, and later of finished rows, in shared memory."""
        return self.tile.m * self.d_head

    @property
    def kv_stage(self) -> int:
        """16-bit elements of one stage of K or of V."""
        return self.tile.n * self.row_width

    @property
    def weight_bits(self) -> float:
        """Log2 of the probability that the reference of a row gets."""
        return 8.0 if self.is_fp8 else 0.0

    @property
    def max_growth(self) -> float:
        """Log2 of what a maximum may exceed the reference by: 448 / 256 leaves less than 1."""
        return 0.75 if self.is_fp8 else 8.0


def tile_smem_bytes(tile: Tile, facts: SdpaFacts) -> int:
    """Shared memory of one CTA: queries or finished rows, and every stage of K and V."""
    stages = 2 * tile.num_stages * tile.n * facts.element_bytes
    return (tile.m * OUT_BYTES + stages) * facts.d_head


def smem_bytes(config: SdpaPortableConfig) -> int:
    """Shared memory of one CTA."""
    return tile_smem_bytes(config.tile, config)
