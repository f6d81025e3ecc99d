# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the portable GEMM kernel, and its tiles."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudnn_blocks.stages.gemm.epilogues import NormRope, OperandTypes, element_bytes

if TYPE_CHECKING:
    from cudnn_blocks.target import Target

ELEMENT_BYTES = 2
FLOAT_BYTES = 4
WARP_THREADS = 32
VEC = 8  # elements of one 16-byte access
K_TILE = 32  # elements of K in a stage: rows of 64 bytes
K_VECS = K_TILE // VEC
MMA_M, MMA_N, MMA_K = 16, 8, 16

RASTER_GROUP = 8
"""Neighbouring tiles along M that take turns before the next column of tiles."""
MAX_KEPT_COPIES = 8
"""Beyond these, ptxas spills rows of a thread's copies beside a tile of decoded codes."""
ROW_PAD = 8
"""Floats between rows of the epilogue's chunk: fragments are stored without bank conflicts."""


@dataclass(frozen=True)
class Tile:
    """The tile of one CTA and how its warps share it."""

    m: int
    n: int
    warps_m: int
    warps_n: int
    num_stages: int
    cost: float
    """Time per output relative to the largest tile, on an H200."""

    def __str__(self) -> str:
        return self.describe(K_TILE)

    def describe(self, k_tile: int) -> str:
        """The tile, with the elements of K that a stage holds."""
        return f"{self.m}x{self.n}x{k_tile} tiles, {self.num_stages} stages"


TILES = (
    Tile(128, 128, 2, 2, 3, 0.92),
    Tile(128, 256, 2, 4, 4, 1.0),
    Tile(64, 256, 1, 4, 4, 1.02),
    Tile(64, 128, 2, 2, 6, 1.02),
    Tile(16, 256, 1, 8, 4, 2.5),
    Tile(16, 128, 1, 4, 8, 3.0),
)
"""The rows, best first where times are equal. Stages take at most 96 KiB, so every target has room
for them, and for two CTAs of the first row."""


@dataclass(frozen=True)
class GemmKernelConfig(OperandTypes):
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    dtype: str
    tile: Tile
    norm_rope: NormRope | None
    """QK-norm and RoPE of the projection slab, or None for a plain product."""
    use_pdl: bool
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
        """Chooses the tile for the largest ``M x N``; the extents themselves are dynamic."""
        del k  # every tile takes it in the same steps
        del promote_every  # codes are multiplied in BF16, whose sums are FP32 as they are

        def time(tile: Tile) -> float:
            tiles = -(-m // tile.m) * -(-n // tile.n)
            return -(-tiles // target.num_sms) * tile.m * tile.n * tile.cost

        rows = [tile for tile in TILES if norm_rope is None or tile.n % norm_rope.d_head == 0]
        return cls(dtype, min(rows, key=time), norm_rope, target.sm >= 90, has_alpha)

    @property
    def k_tile(self) -> int:
        """Elements of K in a stage: rows of 64 bytes."""
        return K_TILE * ELEMENT_BYTES // element_bytes(self.dtype)

    @property
    def has_cvt(self) -> bool:
        """Codes are made by the hardware: known where it has PDL, else integer arithmetic does."""
        return self.use_pdl

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.tile.warps_m * self.tile.warps_n * WARP_THREADS

    @property
    def warp_m(self) -> int:
        """Rows of a warp's part of the tile."""
        return self.tile.m // self.tile.warps_m

    @property
    def warp_n(self) -> int:
        """Columns of a warp's part of the tile."""
        return self.tile.n // self.tile.warps_n

    @property
    def copy_rows(self) -> int:
        """Rows that the threads copy at once: a multiple of 8, so that the swizzle repeats."""
        return self.threads // K_VECS

    @property
    def copies(self) -> int:
        """16-byte copies of a thread and stage."""
        return sum(-(-rows // self.copy_rows) for rows in (self.tile.m, self.tile.n))

    @property
    def recomputes(self) -> bool:
        """Every stage works out anew what a thread copies: so much would not fit beside codes."""
        return self.is_fp8 and self.copies > MAX_KEPT_COPIES

    @property
    def stage_elements(self) -> int:
        """Elements of a stage: rows of x, then rows of w."""
        return (self.tile.m + self.tile.n) * K_TILE

    @property
    def chunk_rows(self) -> int:
        """Rows of the tile that the epilogue finishes at once: an m16 block of every warp."""
        return self.tile.warps_m * MMA_M

    @property
    def chunk_pitch(self) -> int:
        """Floats from row to row of a chunk."""
        return self.tile.n + ROW_PAD

    @property
    def lanes(self) -> int:
        """Neighbouring lanes that finish one row, 8 columns each."""
        return self.tile.n // VEC


def smem_bytes(config: GemmKernelConfig) -> int:
    """Shared memory of one CTA: the stages and, in their place, a chunk of the epilogue."""
    stages = config.tile.num_stages * config.stage_elements * ELEMENT_BYTES
    return max(stages, config.chunk_rows * config.chunk_pitch * FLOAT_BYTES)
