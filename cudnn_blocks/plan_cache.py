# SPDX-License-Identifier: Apache-2.0
"""The bounded cache of compiled plans behind every functional wrapper."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from cudnn_blocks.errors import ContractError

DEFAULT_LIMIT = 128


@dataclass(frozen=True)
class PlanCacheStats:
    """Counters since the last ``clear()``, and the present size."""

    hits: int
    misses: int
    evictions: int
    size: int
    limit: int


class PlanCache:
    """Least recently used plans, ``limit`` of them, safe under threads.

    One thread builds a missing plan while others that ask for the same key wait for it; other keys
    are not held up. A build that raises leaves no trace.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()
        self._building: dict[Hashable, threading.Lock] = {}
        self._limit = limit
        self._hits = self._misses = self._evictions = 0

    def get(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """The plan of ``key``, built by ``build`` if there is none."""
        plan = self.find(key)
        if plan is not None:
            return plan
        with self._lock:
            building = self._building.setdefault(key, threading.Lock())
        with building:
            plan = self.find(key)
            if plan is None:
                try:
                    plan = build()
                    self._insert(key, plan)
                finally:
                    with self._lock:
                        self._building.pop(key, None)
        return plan

    def find(self, key: Hashable) -> Any:
        """The plan of ``key``, or None; a hit makes it the most recently used."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
                self._hits += 1
            return plan

    def stats(self) -> PlanCacheStats:
        """Counters and size."""
        with self._lock:
            return PlanCacheStats(
                self._hits, self._misses, self._evictions, len(self._plans), self._limit
            )

    def clear(self) -> None:
        """Forgets every plan and resets the counters; kernels stay compiled."""
        with self._lock:
            self._plans.clear()
            self._hits = self._misses = self._evictions = 0

    def set_limit(self, limit: int) -> None:
        """Sets how many plans are kept; evicts the least recently used beyond it."""
        if type(limit) is not int or limit < 1:
            raise ContractError("limit", "a positive int", repr(limit))
        with self._lock:
            self._limit = limit
            self._evict()

    def _insert(self, key: Hashable, plan: Any) -> None:
        with self._lock:
            self._plans[key] = plan
            self._misses += 1
            self._evict()

    def _evict(self) -> None:
        while len(self._plans) > self._limit:
            self._plans.popitem(last=False)
            self._evictions += 1


PLANS = PlanCache()
"""The cache that all functional wrappers share."""
