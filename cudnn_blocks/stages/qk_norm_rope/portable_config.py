# SPDX-License-Identifier: Apache-2.0
"""Compile-time facts of one specialisation of the QK norm and RoPE kernel."""

from dataclasses import dataclass, replace

VEC = 8  # channels of one 16-byte access
THREADS = 256
PREFERRED_LANES = 8  # one vector of each: a line of 128 bytes
MAX_LANE_VECS = 4
MAX_LANE_LOADS = 18  # vectors that one lane holds: of its heads, weights and tables


@dataclass(frozen=True)
class QkNormRopeConfig:
    """Compile-time facts of one specialisation; ``from_geometry`` is the only chooser."""

    dtype: str
    """``bf16`` or ``fp16``."""
    h_q: int
    h_kv: int
    d_head: int
    rope_dim: int
    has_norm: bool
    lanes: int
    """Neighbouring lanes that share a head: a power of two."""
    heads: int
    """Heads of a unit."""
    threads: int
    use_pdl: bool

    @classmethod
    def from_geometry(
        cls, target, *, dtype, h_q, h_kv, d_head, rope_dim, has_norm
    ) -> "QkNormRopeConfig":
        """Without a norm only the channels that rotate are touched."""
        assert has_norm or rope_dim, "neither norm nor rotation: nothing to do"
        one_head = cls(
            dtype=dtype,
            h_q=h_q,
            h_kv=h_kv,
            d_head=d_head,
            rope_dim=rope_dim,
            has_norm=has_norm,
            lanes=choose_lanes(-(-(d_head if has_norm else rope_dim) // VEC)),
            heads=1,
            threads=THREADS,
            use_pdl=target.sm >= 90,
        )
        most = (MAX_LANE_LOADS - one_head.shared_loads) // one_head.head_loads
        return replace(one_head, heads=choose_heads(h_q, h_kv, max(most, 1)))

    @property
    def rope_vecs(self) -> int:
        """Vectors of a head with channels that rotate."""
        return -(-self.rope_dim // VEC)

    @property
    def num_vecs(self) -> int:
        """Vectors of a head that are written."""
        return self.d_head // VEC if self.has_norm else self.rope_vecs

    @property
    def lane_vecs(self) -> int:
        """Vectors of one lane in a head."""
        return -(-self.num_vecs // self.lanes)

    @property
    def lane_rope_vecs(self) -> int:
        """Those among them, from the first on, that rotate in some lane."""
        return -(-self.rope_vecs // self.lanes)

    @property
    def half(self) -> int:
        """From a channel that rotates to its partner."""
        return self.rope_dim // 2

    @property
    def has_vector_partners(self) -> bool:
        """The partners of a vector's channels are a vector too."""
        return self.half % VEC == 0

    @property
    def has_own_partners(self) -> bool:
        """They are one of the same lane."""
        return self.half % (VEC * self.lanes) == 0

    @property
    def head_loads(self) -> int:
        """Vectors that one lane loads of a head."""
        return self.lane_vecs + (0 if self.has_own_partners else self.lane_rope_vecs)

    @property
    def shared_loads(self) -> int:
        """Vectors that one lane loads of the weights and tables."""
        return self.head_loads * self.has_norm + 2 * self.lane_rope_vecs

    @property
    def q_units(self) -> int:
        """Units of one token's Q."""
        return -(-self.h_q // self.heads)

    @property
    def token_units(self) -> int:
        """Units of one token."""
        return self.q_units + -(-self.h_kv // self.heads)

    @property
    def is_ragged(self) -> bool:
        """Some unit has fewer heads than the others."""
        return self.h_q % self.heads != 0 or self.h_kv % self.heads != 0

    @property
    def cta_units(self) -> int:
        """Units of one CTA."""
        return self.threads // self.lanes


def choose_lanes(num_vecs: int) -> int:
    """Lanes per head: fewest idle ones, then whole lines, among those with few vectors each."""
    widths = [lanes for lanes in (1, 2, 4, 8, 16, 32) if -(-num_vecs // lanes) <= MAX_LANE_VECS]
    return min(
        widths,
        key=lambda lanes: (-(-num_vecs // lanes) * lanes, abs(lanes - PREFERRED_LANES), lanes),
    )


def choose_heads(h_q: int, h_kv: int, most: int) -> int:
    """Heads per unit, up to ``most``: fewest idle places, then most heads."""

    def places(heads: int) -> int:
        return (-(-h_q // heads) + -(-h_kv // heads)) * heads

    return min(range(1, most + 1), key=lambda heads: (places(heads), -heads))


def smem_bytes(config: QkNormRopeConfig) -> int:
    """Shared memory of one CTA: none."""
    return 0
