# SPDX-License-Identifier: Apache-2.0
"""The switch that keeps a serving process from compiling."""

from __future__ import annotations

_refused = False


def refuse_compiles(refuse: bool = True) -> None:
    """From now on a kernel that no bundle and no cache has is a CompileRefusedError at compile().

    Args:
        refuse: False lifts the refusal.
    """
    global _refused
    _refused = refuse


def are_compiles_refused() -> bool:
    """Whether ``refuse_compiles`` is in force."""
    return _refused
