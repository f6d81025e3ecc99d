# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the normalisation kernel."""

from dataclasses import dataclass

VEC = 8  # channels of one 16-byte access
WARP_THREADS = 32
THREADS = 256
MAX_LANE_VECS = 6  # vectors of a lane, as long as a site has fewer than 32 lanes


@dataclass(frozen=True)
class RmsNormSiluPadConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    channels: int
    has_input_bias: bool
    has_previous: bool
    has_residual: bool
    has_residual_bias: bool
    has_residual_output: bool
    lanes: int
    """Neighbouring lanes that share a site: a power of two."""
    threads: int
    use_pdl: bool

    @classmethod
    def from_geometry(
        cls,
        channels,
        target,
        *,
        has_input_bias,
        has_previous,
        has_residual,
        has_residual_bias,
        has_residual_output,
        history_frames,
    ) -> "RmsNormSiluPadConfig":
        """Whether there is history is compiled in; how many frames of it there are is not."""
        assert has_previous == (history_frames > 0), f"{has_previous=} with {history_frames=}"
        return cls(
            channels=channels,
            has_input_bias=has_input_bias,
            has_previous=has_previous,
            has_residual=has_residual,
            has_residual_bias=has_residual_bias,
            has_residual_output=has_residual_output,
            lanes=choose_lanes(channels // VEC),
            threads=THREADS,
            use_pdl=target.sm >= 90,
        )

    @property
    def lane_vecs(self) -> int:
        """Vectors of one lane."""
        return -(-self.channels // (VEC * self.lanes))

    @property
    def has_tail(self) -> bool:
        """The last vector of the last lanes lies beyond the channels."""
        return self.lanes * self.lane_vecs * VEC != self.channels

    @property
    def sites_per_cta(self) -> int:
        """Padded pixels of one CTA."""
        return self.threads // self.lanes


def choose_lanes(num_vecs: int) -> int:
    """Lanes per site: fewest idle, then fewest; 64 bytes at a time where a row has them."""
    widths = [lanes for lanes in (1, 2, 4, 8, 16, 32) if lanes >= min(4, num_vecs)]
    fitting = [lanes for lanes in widths if -(-num_vecs // lanes) <= MAX_LANE_VECS] or [
        WARP_THREADS
    ]
    return min(fitting, key=lambda lanes: (-(-num_vecs // lanes) * lanes, lanes))


def smem_bytes(config: RmsNormSiluPadConfig) -> int:
    """Shared memory of one CTA: none."""
    return 0
