# SPDX-License-Identifier: Apache-2.0
"""What every SDPA kernel has compiled in, whatever its tiles."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MAX_WINDOW = 2**29
"""A window that shows every key of a sequence of up to 2**28; larger ones are cut to it."""


@dataclass(frozen=True)
class SdpaFacts:
    """Heads, mask and operands of one specialisation."""

    dtype: str
    """``bf16`` or ``fp16``."""
    h_q: int
    h_kv: int
    d_head: int
    is_causal: bool
    causal_bottom_right: bool
    window_left: int
    """Keys shown left of the diagonal; -1 for all."""
    window_right: int
    """Keys shown right of a causal diagonal; -1 and 0 for none."""
    has_gate: bool
    has_lse: bool
    has_seq_lens: bool

    @property
    def gqa_ratio(self) -> int:
        """Query heads that share one key and value head."""
        return self.h_q // self.h_kv

    @property
    def has_window_left(self) -> bool:
        """Keys far to the left are hidden."""
        return self.window_left >= 0

    def as_compiled(self) -> dict[str, Any]:
        """The fields in one spelling for each mask, so that equal masks are one specialisation."""
        right = min(max(self.window_right, 0), MAX_WINDOW) if self.is_causal else 0
        return asdict(self) | {
            "causal_bottom_right": self.is_causal and self.causal_bottom_right,
            "window_left": min(self.window_left, MAX_WINDOW),
            "window_right": right,
        }
