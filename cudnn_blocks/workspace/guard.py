# SPDX-License-Identifier: Apache-2.0
"""Guarded buffers for tests: the exact bytes asked for, between two guards that must survive."""

from __future__ import annotations

import torch

GUARD_BYTES = 4096
GUARD_VALUE = 0xA5
POISON_VALUE = 0xFF


class GuardedBuffer:
    """``size_bytes`` usable bytes, filled with 0xFF, between two 4 KiB guards of 0xA5."""

    def __init__(self, size_bytes: int, device: torch.device | str) -> None:
        self._all = torch.full(
            (size_bytes + 2 * GUARD_BYTES,), GUARD_VALUE, dtype=torch.uint8, device=device
        )
        self.bytes = self._all[GUARD_BYTES : GUARD_BYTES + size_bytes]
        """The usable bytes, a uint8 vector."""
        self.bytes.fill_(POISON_VALUE)

    def is_intact(self) -> bool:
        """True while both guards hold their value; reads the device."""
        size_bytes = self.bytes.numel()
        front, back = self._all[:GUARD_BYTES], self._all[GUARD_BYTES + size_bytes :]
        return bool((front == GUARD_VALUE).all()) and bool((back == GUARD_VALUE).all())
