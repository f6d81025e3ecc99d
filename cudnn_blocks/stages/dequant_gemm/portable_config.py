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
PREFETCH = 2
"""Steps of a warp that are on their way at once."""

ACTIVATION_BYTES = 2
FLOAT_BYTES = 4
MMA_N = 8
TOKENS = (8, 16, 32, 64)
PART_PITCH = ROWS + 4  # floats from token to token: fragments are stored without bank conflicts
STAGE_BYTES = 64 << 10
"""Most shared memory for x: three CTAs fit where an SM has 227 KiB, one where it has 99."""

MAX_CLUSTER = 8
OVERHEAD_STEPS = 2
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
        room = most_ctas(tokens, block_size) * target.num_sms

        def time(splits: int) -> int:
            return _ceil_div(tiles * splits, room) * (_ceil_div(steps, splits) + OVERHEAD_STEPS)

        splits = min(range(1, MAX_CLUSTER + 1), key=time) if has_clusters else 1
        warps_k = 2 if tiles * splits <= target.num_sms else 1
        share = _ceil_div(_ceil_div(steps, splits), warps_k)
        staged = min(STAGE_BYTES // (tokens * STEP * ACTIVATION_BYTES) // warps_k, share) * warps_k
        return cls(codes_per_byte, block_size, tokens, warps_k, splits, staged, has_clusters)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARPS_N * self.warps_k * WARP_THREADS

    @property
    def ctas_per_sm(self) -> int:
        """CTAs for whose registers there has to be room."""
        return 1 if self.warps_k > 1 else most_ctas(self.tokens, self.block_size)

    @property
    def loads(self) -> int:
        """16-byte loads of a row and step by one thread."""
        return STEP // self.codes_per_byte // 16 // 4

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


def most_ctas(tokens: int, block_size: int) -> int:
    """CTAs of 4 warps that an SM has registers for; E8M0 scales bring a second mainloop."""
    return 3 if tokens <= 32 and block_size == 16 else 2


def shared_bytes(config: DecodeKernelConfig) -> int:
    """Bytes of x and, in its place, of the sums of a CTA's warps."""
    x = config.tokens * config.staged_steps * STEP * ACTIVATION_BYTES
    return max(x, config.warps_k * config.tokens * PART_PITCH * FLOAT_BYTES)


def smem_bytes(config: DecodeKernelConfig) -> int:
    """Shared memory of one CTA: that, and a word per warp."""
    return shared_bytes(config) + config.threads // WARP_THREADS * FLOAT_BYTES


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
