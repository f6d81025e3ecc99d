# SPDX-License-Identifier: Apache-2.0
"""What every SDPA kernel has compiled in, whatever its tiles."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

E4M3 = "e4m3"
MAX_WINDOW = 2**29
"""A window that shows every key of a sequence of up to 2**28; larger ones are cut to it."""


@dataclass(frozen=True)
class SdpaFacts:
    """Heads, mask and operands of one specialisation."""

    dtype: str
    """Of q, k and v: ``bf16``, ``fp16`` or ``e4m3``."""
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
    has_o_codes: bool = field(default=False, kw_only=True)
    """o is e4m3; of e4m3 operands alone."""

    @property
    def is_fp8(self) -> bool:
        """q, k and v are e4m3 codes."""
        return self.dtype == E4M3

    @property
    def act_dtype(self) -> str:
        """Of the gate, and what the result is rounded to before it may become codes."""
        return "bf16" if self.is_fp8 else self.dtype

    @property
    def o_dtype(self) -> str:
        """Of o."""
        return E4M3 if self.has_o_codes else self.act_dtype

    @property
    def element_bytes(self) -> int:
        """Of q, k and v."""
        return 1 if self.is_fp8 else 2

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
