# SPDX-License-Identifier: Apache-2.0
"""Counts calls of ``cutlass.cute.compile``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class _Counting:
    """Stands in for ``cute.compile``, options in brackets included."""

    def __init__(self, inner: Any, calls: list[int]) -> None:
        self._inner = inner
        self._calls = calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls[0] += 1
        return self._inner(*args, **kwargs)

    def __getitem__(self, options: Any) -> _Counting:
        return _Counting(self._inner[options], self._calls)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def counted(work: Callable[[], object], namespace: Any) -> int:
    """Calls of ``namespace.compile`` while ``work`` runs."""
    calls = [0]
    original = namespace.compile
    namespace.compile = _Counting(original, calls)
    try:
        work()
    finally:
        namespace.compile = original
    return calls[0]


def counted_compiles(work: Callable[[], object]) -> int:
    """Calls of ``cute.compile`` while ``work`` runs."""
    import cutlass.cute as cute

    return counted(work, cute)
