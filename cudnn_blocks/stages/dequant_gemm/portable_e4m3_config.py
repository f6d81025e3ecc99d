# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the product of few rows with e4m3 weights."""

from collections.abc import Iterator
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

GROUP_ROWS = 32
"""Weight rows of a group, which a warp multiplies at a time: 8 neighbours, 4 times 32 apart."""
SLOTS = 4
"""Weight rows of a thread, 32 apart, whose scales lie together in the blob."""
LOADS = STEP // VECTOR_BYTES // 4
"""16-byte loads of a row and step by one of the 4 threads that share the row."""
VECTORS = LOADS * SLOTS + 1
"""16-byte vectors of a thread and step: codes, then one of scales."""

MMA_N = 8
TOKENS = (8, 16, 32, 64)
WARPS = {8: (12, 8, 4), 16: (12, 8, 4), 32: (12, 8, 4), 64: (8, 4)}
"""Choices of ``warps``, by tokens; no more than registers allow."""
SPLITS = (1, 2)
"""CTAs of a cluster (sm_90 and newer). Larger ones leave SMs of a GPC without work."""
MAX_DEPTH = 4
SUBPARTITIONS = 4
"""Of an SM; units are rounded up to them."""
TURN_UNITS, CLUSTER_UNITS = 12, 6
"""What filling x and what a cluster costs an SM, in units."""
PART_PAD = 4  # floats between tokens: fragments are stored without bank conflicts


@dataclass(frozen=True)
class E4m3DecodeConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    tokens: int
    """Rows of x of a CTA, a multiple of 8."""
    warps: int
    """Of a CTA."""
    splits: int
    """CTAs of a cluster, which share K."""
    groups: int
    """Groups of weight rows of a cluster, and of every CTA in it."""
    turns: int
    """Times that x is filled; at most so often, for a CTA's part of K."""
    turn_steps: int
    """Steps of a CTA's part of K that have their x in shared memory at once."""
    depth: int
    """Steps of a warp whose codes are on their way at once."""
    least_smem_bytes: int
    """Shared memory that no second CTA fits beside: pairs would share an SM, others have none."""
    use_pdl: bool

    @classmethod
    def from_geometry(cls, m: int, n: int, k: int, target: "Target") -> "E4m3DecodeConfig":
        """Chooses for the largest ``M``; N and K are dynamic, but decide how work is shared."""
        tokens = next((size for size in TOKENS if m <= size), TOKENS[-1])
        token_tiles = ceil_div(max(m, 1), tokens)
        all_groups = ceil_div(n, BLOB_TILE) * (BLOB_TILE // GROUP_ROWS)
        steps = ceil_div(k, STEP)

        def choices() -> Iterator[tuple[float, E4m3DecodeConfig]]:
            for splits in SPLITS if target.sm >= 90 else SPLITS[:1]:
                share = ceil_div(steps, splits)
                most = ceil_div(all_groups, max(target.num_sms // splits // token_tiles, 1))
                once = CLUSTER_UNITS if splits > 1 else 0
                for waves in range(1, most + 1):
                    groups = ceil_div(most, waves)
                    shapes = [(tokens, warps, splits, groups) for warps in WARPS[tokens]]
                    tried = [cls.of_shape(shape, share, target) for shape in shapes]
                    found = [config for config in tried if config is not None]
                    for config in found:
                        yield waves * config.cost + once, config
                    if any(config.turns == 1 for config in found):
                        break

        return min(choices(), key=lambda choice: choice[0])[1]

    @classmethod
    def of_shape(
        cls, shape: tuple[int, int, int, int], share: int, target: "Target"
    ) -> "E4m3DecodeConfig | None":
        """The fewest turns that shared memory has room for; None where it has for none.

        Codes have two steps of a warp on their way, or all that it has.
        """
        *_, warps, _, groups = shape
        least = target.smem_per_cta_bytes // 2 + 1
        for turns in range(1, share + 1):
            turn_steps = ceil_div(share, turns)
            wanted = min(ceil_div(groups * turn_steps, warps), MAX_DEPTH)
            for depth in range(wanted, min(wanted, 2) - 1, -1):
                config = cls(*shape, turns, turn_steps, depth, least, target.sm >= 90)
                if smem_bytes(config) <= target.smem_per_cta_bytes:
                    return config
        return None

    @property
    def cost(self) -> float:
        """Of a CTA, in units: those of the busiest part of an SM, and of filling x."""
        units = ceil_div(self.units, SUBPARTITIONS) * SUBPARTITIONS
        stalls = 1 + SUBPARTITIONS / self.warps  # the fewer warps, the less they hide
        return self.turns * (units * stalls + TURN_UNITS)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * WARP_THREADS

    @property
    def units(self) -> int:
        """Groups times steps of a turn, which the warps of a CTA share."""
        return self.groups * self.turn_steps

    @property
    def prefetches(self) -> bool:
        """A CTA asks for all its codes ahead."""
        code_bytes = self.units * GROUP_ROWS * STEP
        return self.use_pdl and self.turns == 1 and code_bytes <= PREFETCH_BYTES

    @property
    def refetches(self) -> bool:
        """A warp has more steps than places in its ring."""
        return self.turns > 1 or ceil_div(self.units, self.busy_warps) > self.depth

    def clusters(self, n: Any) -> Any:
        """Clusters that share ``n`` weight rows, which fill tiles of the blob."""
        return (((n - 1) // BLOB_TILE + 1) * SLOTS - 1) // self.groups + 1

    @property
    def busy_warps(self) -> int:
        """Warps that have units: the first ones."""
        return min(self.warps, self.units)

    def first_unit(self, warp: Any) -> Any:
        """Of a busy warp; the next warp's is the one past its last."""
        return warp * self.units // self.busy_warps

    def warp_of(self, unit: Any) -> Any:
        """The warp that has a unit."""
        return ((unit + 1) * self.busy_warps - 1) // self.units

    @property
    def pieces(self) -> int:
        """The most warps that share a group."""
        turn = self.turn_steps
        return max(
            self.warp_of(group * turn + turn - 1) - self.warp_of(group * turn) + 1
            for group in range(self.groups)
        )

    @property
    def parts(self) -> int:
        """Places for sums: the one of group ``g`` and warp ``w`` is ``g + w``, no other's."""
        return self.groups + self.warps - 1

    @property
    def part_pitch(self) -> int:
        """Floats from token to token of a place."""
        return GROUP_ROWS + PART_PAD

    def __str__(self) -> str:
        rows = f"{self.groups * GROUP_ROWS} rows x {self.tokens} tokens"
        shared = f", cluster of {self.splits} along K" if self.splits > 1 else ""
        return f"{rows}, {self.warps} warps{shared}"


def sums_bytes(config: E4m3DecodeConfig) -> int:
    """Bytes of the sums of every group and warp."""
    return config.parts * config.tokens * config.part_pitch * FLOAT_BYTES


def x_bytes(config: E4m3DecodeConfig) -> int:
    """Bytes of x."""
    return config.tokens * config.turn_steps * STEP * ACTIVATION_BYTES


def smem_bytes(config: E4m3DecodeConfig) -> int:
    """Shared memory of one CTA: sums, x, and the ring of codes and scales."""
    ring = config.depth * VECTORS * config.threads * VECTOR_BYTES
    return max(sums_bytes(config) + x_bytes(config) + ring, config.least_smem_bytes)
