# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the small-M product with block-scaled weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudnn_blocks.target import Target

BLOB_TILE = 128
"""Weight rows of a tile of the scale blob."""
WARP_ROWS = 32
"""Weight rows of a warp: 8 neighbours, 4 times 32 apart."""
STEP = 128
"""Elements of K that a warp takes at a time: whole columns of blob tiles."""
SLOTS = 4
"""Weight rows of a thread, 32 apart, whose scales lie together in the blob."""
WARP_THREADS = 32
VECTOR_BYTES = 16

ACTIVATION_BYTES = 2
FLOAT_BYTES = 4
MMA_N = 8
TOKENS = (8, 16, 32, 64)
WARPS = 4
"""Of a CTA."""
WARPS_N = {8: (1, 2, 4), 16: (2, 4), 32: (4,), 64: (4,)}
"""Choices of ``warps_n``, the more the more x there is to share; the first that fills the GPU once
at most."""
PART_PAD = 4  # floats between tokens: fragments are stored without bank conflicts
LARGE_SMEM_BYTES = 160 << 10
"""Shared memory that several CTAs can share."""
RESERVED_BYTES = 1 << 10
"""Shared memory that every CTA costs beside its own."""

MAX_CLUSTER = 8


@dataclass(frozen=True)
class DecodeKernelConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    codes_per_byte: int
    """2 for e2m1 codes, 1 for e4m3."""
    block_size: int
    """Elements under a scale: 32 with E8M0 scales, 16 with e4m3."""
    tokens: int
    """Rows of x of a CTA, a multiple of 8."""
    warps_n: int
    """Warps along N: 1, 2 or 4, which share x."""
    warps_k: int
    """Warps that take turns along K."""
    splits: int
    """CTAs of a cluster, which share K."""
    staged_steps: int
    """Steps whose x is in shared memory at once; a multiple of ``warps_k``."""
    depth: int
    """Steps of a warp whose codes are on their way at once."""
    ctas_per_sm: int
    """CTAs for whose registers there has to be room."""
    use_pdl: bool

    @classmethod
    def from_geometry(
        cls, m: int, n: int, k: int, target: "Target", *, codes_per_byte: int, block_size: int
    ) -> "DecodeKernelConfig":
        """Chooses for the largest ``M``; N and K are dynamic, but decide how K is shared."""
        tokens = next((size for size in TOKENS if m <= size), TOKENS[-1])
        token_tiles = _ceil_div(max(m, 1), tokens)
        ctas = most_ctas(tokens, codes_per_byte, target)
        room = ctas * target.num_sms

        def tiles(warps_n: int) -> int:
            return _ceil_div(n, BLOB_TILE) * (SLOTS // warps_n) * token_tiles

        fitting = (one for one in WARPS_N[tokens] if tiles(one) <= room)
        warps_n = next(fitting, WARPS_N[tokens][-1])
        splits = min(max(room // tiles(warps_n), 1), MAX_CLUSTER) if target.sm >= 90 else 1
        shape = (tokens, warps_n, WARPS // warps_n, splits, ctas)
        return cls.of_shape(codes_per_byte, block_size, k, shape, target)

    @classmethod
    def of_shape(
        cls,
        codes_per_byte: int,
        block_size: int,
        k: int,
        shape: tuple[int, int, int, int, int],
        target: "Target",
    ) -> "DecodeKernelConfig":
        """Divides shared memory between x and codes, for tokens, warps, splits and CTAs an SM."""
        tokens, warps_n, warps_k, splits, ctas = shape
        turns = _ceil_div(_ceil_div(_ceil_div(k, STEP), splits), warps_k)
        budget = (target.smem_per_cta_bytes + RESERVED_BYTES) // ctas - RESERVED_BYTES
        turn_bytes = warps_k * tokens * STEP * ACTIVATION_BYTES
        slot_bytes = warps_n * warps_k * WARP_THREADS * vectors_of(codes_per_byte) * VECTOR_BYTES
        staged = max(min(budget // 2 // turn_bytes, turns), 1)
        depth = max(min((budget - staged * turn_bytes) // slot_bytes, turns), 1)
        sizes = (tokens, warps_n, warps_k, splits, staged * warps_k, depth, ctas)
        return cls(codes_per_byte, block_size, *sizes, use_pdl=target.sm >= 90)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps_n * self.warps_k * WARP_THREADS

    @property
    def rows(self) -> int:
        """Weight rows of a CTA."""
        return self.warps_n * WARP_ROWS

    def row_tiles(self, n: Any) -> Any:
        """CTAs that share ``n`` weight rows, which fill tiles of the blob."""
        return ((n - 1) // BLOB_TILE + 1) * (SLOTS // self.warps_n)

    @property
    def part_pitch(self) -> int:
        """Floats from token to token of a warp's sums: fragments are stored without conflicts."""
        return self.rows + PART_PAD

    @property
    def loads(self) -> int:
        """16-byte loads of a row and step by one thread."""
        return loads_of(self.codes_per_byte)

    @property
    def vectors(self) -> int:
        """16-byte vectors of a thread and step: codes, then one of scales."""
        return vectors_of(self.codes_per_byte)

    @property
    def is_mx(self) -> bool:
        """Scales are powers of two."""
        return self.block_size == 32

    @property
    def is_fp4(self) -> bool:
        """Codes are e2m1."""
        return self.codes_per_byte == 2

    def __str__(self) -> str:
        shared = f", cluster of {self.splits} along K" if self.splits > 1 else ""
        return f"{self.rows} rows x {self.tokens} tokens, {self.warps_k} warps along K{shared}"


def loads_of(codes_per_byte: int) -> int:
    """16-byte loads of a row and step by one of the 4 threads that share the row."""
    return STEP // codes_per_byte // VECTOR_BYTES // 4


def vectors_of(codes_per_byte: int) -> int:
    """16-byte vectors of a thread and step."""
    return loads_of(codes_per_byte) * SLOTS + 1


def most_ctas(tokens: int, codes_per_byte: int, target: "Target") -> int:
    """CTAs that an SM has room for, in shared memory and registers."""
    if target.smem_per_cta_bytes < LARGE_SMEM_BYTES:
        return 1
    return 3 if tokens <= 16 and codes_per_byte == 2 else 2


def x_bytes(config: DecodeKernelConfig) -> int:
    """Bytes of x."""
    return config.tokens * config.staged_steps * STEP * ACTIVATION_BYTES


def smem_bytes(config: DecodeKernelConfig) -> int:
    """Shared memory of one CTA: x and the ring, then, in their place, the sums of its warps."""
    ring = config.depth * config.vectors * config.threads * VECTOR_BYTES
    sums = config.warps_k * config.tokens * config.part_pitch * FLOAT_BYTES
    return max(x_bytes(config) + ring, sums)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
