# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the small-M product with block-scaled weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cudnn_blocks.target import Target

ROWS = 128
"""Weight rows of a CTA: a row tile of the scale blob."""
STEP = 128
"""Elements of K that a warp takes at a time: whole columns of blob tiles."""
SLOTS = 4
"""Weight rows of a thread, 32 apart, whose scales lie together in the blob."""
WARPS_N = 4
WARP_THREADS = 32
VECTOR_BYTES = 16

ACTIVATION_BYTES = 2
FLOAT_BYTES = 4
MMA_N = 8
TOKENS = (8, 16, 32, 64)
PART_PITCH = ROWS + 4  # floats from token to token: fragments are stored without bank conflicts
LARGE_SMEM_BYTES = 160 << 10
"""Shared memory that several CTAs can share."""
RESERVED_BYTES = 1 << 10
"""Shared memory that every CTA costs beside its own."""

MAX_CLUSTER = 8
OVERHEAD_STEPS = 4
"""What a CTA costs beside its steps, in steps: an estimate."""


@dataclass(frozen=True)
class DecodeKernelConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    codes_per_byte: int
    """2 for e2m1 codes, 1 for e4m3."""
    block_size: int
    """Elements under a scale: 32 with E8M0 scales, 16 with e4m3."""
    tokens: int
    """Rows of x of a CTA, a multiple of 8."""
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
        tiles = _ceil_div(n, ROWS) * _ceil_div(max(m, 1), tokens)
        steps = _ceil_div(k, STEP)
        has_clusters = target.sm >= 90
        ctas = most_ctas(tokens, codes_per_byte, target)

        def time(splits: int) -> int:
            waves = _ceil_div(tiles * splits, ctas * target.num_sms)
            return waves * (_ceil_div(steps, splits) + OVERHEAD_STEPS)

        splits = min(range(1, MAX_CLUSTER + 1), key=time) if has_clusters else 1
        warps_k, ctas = (2, 1) if tiles * splits <= target.num_sms else (1, ctas)
        share = _ceil_div(_ceil_div(steps, splits), warps_k)
        budget = (target.smem_per_cta_bytes + RESERVED_BYTES) // ctas - RESERVED_BYTES
        turn_bytes = warps_k * tokens * STEP * ACTIVATION_BYTES
        turns = min(budget // 2 // turn_bytes, share)
        slot_bytes = warps_k * WARPS_N * WARP_THREADS * vectors_of(codes_per_byte) * VECTOR_BYTES
        depth = max(min((budget - turns * turn_bytes) // slot_bytes, share), 1)
        facts = (tokens, warps_k, splits, turns * warps_k, depth, ctas)
        return cls(codes_per_byte, block_size, *facts, use_pdl=has_clusters)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARPS_N * self.warps_k * WARP_THREADS

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
        return f"{ROWS} rows x {self.tokens} tokens, {self.warps_k} warps along K{shared}"


def loads_of(codes_per_byte: int) -> int:
    """16-byte loads of a row and step by one of the 4 threads that share the row."""
    return STEP // codes_per_byte // VECTOR_BYTES // 4


def vectors_of(codes_per_byte: int) -> int:
    """16-byte vectors of a thread and step."""
    return loads_of(codes_per_byte) * SLOTS + 1


def most_ctas(tokens: int, codes_per_byte: int, target: "Target") -> int:
    """CTAs of 4 warps that an SM has room for, in shared memory and registers."""
    if target.smem_per_cta_bytes < LARGE_SMEM_BYTES:
        return 1
    return 3 if tokens <= 16 and codes_per_byte == 2 else 2


def x_bytes(config: DecodeKernelConfig) -> int:
    """Bytes of x."""
    return config.tokens * config.staged_steps * STEP * ACTIVATION_BYTES


def smem_bytes(config: DecodeKernelConfig) -> int:
    """Shared memory of one CTA: x and the ring, then, in their place, the sums of its warps."""
    ring = config.depth * config.vectors * config.threads * VECTOR_BYTES
    sums = config.warps_k * config.tokens * PART_PITCH * FLOAT_BYTES
    return max(x_bytes(config) + ring, sums)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
