# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of the portable decode update."""

import math
from dataclasses import dataclass

ELEMENT_BYTES = 2
WORD_BYTES = 4
WARP_THREADS = 32
SM_THREADS = 2048
VECTOR_ELEMENTS = 8  # 16 bytes

SCAN_LOADS = 8  # indices a thread has in flight while it looks for duplicates


@dataclass(frozen=True)
class CausalConv1dUpdateConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    dtype: str
    channels: int
    width: int
    state_len: int
    state_layout: str
    activation: str
    has_bias: bool
    has_indices: bool
    bad_index: str
    use_pdl: bool
    num_sms: int

    @classmethod
    def from_geometry(
        cls, geometry, target, *, dtype, state_layout, activation, has_bias, has_indices, bad_index
    ) -> "CausalConv1dUpdateConfig":
        """PDL needs sm_90; every other tile constant follows from the sizes alone."""
        return cls(
            dtype=dtype,
            channels=geometry.channels,
            width=geometry.width,
            state_len=geometry.state_len,
            state_layout=state_layout,
            activation=activation,
            has_bias=has_bias,
            has_indices=has_indices,
            bad_index=bad_index,
            use_pdl=target.sm >= 90,
            num_sms=target.num_sms,
        )

    @property
    def vec(self) -> int:
        """Channels per thread: 16 bytes of state, or 4 channels of three tokens, if D divides."""
        return math.gcd(4 if self.state_len == 3 else 8 // self.state_len, self.channels)

    @property
    def stages_state(self) -> bool:
        """Whether 16-byte vectors of the state pass through shared memory."""
        return self.state_len == 3 and self.channels % VECTOR_ELEMENTS == 0

    @property
    def warp_channels(self) -> int:
        """Channels of one warp."""
        return WARP_THREADS * self.vec

    @property
    def warp_vectors(self) -> int:
        """16-byte vectors in one warp's slice of a row of state."""
        return self.warp_channels * self.state_len // VECTOR_ELEMENTS

    @property
    def threads(self) -> int:
        """Threads per CTA: whole warps, no more than one row of channels needs."""
        needed = -(-self.channels // self.vec)
        return min(128, -(-needed // WARP_THREADS) * WARP_THREADS)

    @property
    def num_warps(self) -> int:
        """Warps per CTA."""
        return self.threads // WARP_THREADS

    @property
    def num_channel_tiles(self) -> int:
        """CTAs along a row."""
        return -(-self.channels // (self.threads * self.vec))

    @property
    def has_channel_tail(self) -> bool:
        """Whether the last CTA of a row has threads without channels."""
        return self.channels % (self.threads * self.vec) != 0

    @property
    def rows_small(self) -> int:
        """Rows per CTA of a small batch, where every thread counts."""
        return 1

    @property
    def rows_large(self) -> int:
        """Rows per CTA of a large batch: reuses the filter and keeps more loads in flight.

        Staged state is in flight without registers, and more rows only cost occupancy.
        """
        return 1 if self.stages_state else 4

    @property
    def large_batch_rows(self) -> int:
        """Batch from which ``rows_large`` is used."""
        return min(max(2 * self.rows_large, (1 << 20) // self.channels), 4096)

    @property
    def min_ctas(self) -> int:
        """CTAs per SM asked of the register allocator: left free, ptxas spills to fit one more."""
        return 1

    @property
    def state_strides(self) -> tuple[int, int, int]:
        """Strides of the state over (slot, channel, token), in elements."""
        d, l = self.channels, self.state_len
        return (3 * d, 1, d) if self.state_layout == "channel_last" else (d * l, l, 1)

    @property
    def first_wave_ctas(self) -> int:
        """CTAs that may be resident at once; for later ones a prefetch only repeats their loads."""
        return self.num_sms * (SM_THREADS // self.threads)

    @property
    def use_prefetch(self) -> bool:
        """Slices of the tile are contiguous multiples of 16 bytes whose addresses need no load."""
        return self.use_pdl and not self.has_indices and self.channels % 8 == 0


def smem_bytes(config: CausalConv1dUpdateConfig) -> int:
    """Shared memory of one CTA with the most rows."""
    staged_elements = config.threads * config.vec * config.state_len * config.rows_large
    staged_bytes = staged_elements * ELEMENT_BYTES if config.stages_state else 0
    is_report = config.has_indices and config.bad_index == "report"
    return staged_bytes + (config.num_warps * WORD_BYTES if is_report else 0)
