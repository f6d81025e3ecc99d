# SPDX-License-Identifier: Apache-2.0
"""PlanCache: LRU, counters, and one build per key under threads (S26)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_blocks import ContractError
from cudnn_blocks.plan_cache import DEFAULT_LIMIT, PLANS, PlanCache, PlanCacheStats

NUM_THREADS = 8
WAIT_S = 20


def never():
    raise AssertionError("built although the plan is there")


def test_a_plan_is_built_once_and_found_after():
    cache = PlanCache()
    plan = cache.get("a", object)
    assert cache.get("a", never) is plan
    assert cache.stats() == PlanCacheStats(hits=1, misses=1, evictions=0, size=1, limit=128)


def test_the_shared_cache_holds_128():
    assert DEFAULT_LIMIT == 128
    assert PLANS.stats().limit == 128


def test_the_least_recently_used_goes_first():
    cache = PlanCache(2)
    first, second = cache.get("a", object), cache.get("b", object)
    cache.get("a", never)
    cache.get("c", object)
    assert cache.get("a", never) is first
    assert cache.get("b", object) is not second
    assert cache.stats().evictions == 2


@given(st.integers(1, 4), st.lists(st.integers(0, 6), max_size=40))
def test_it_behaves_as_a_list_of_recent_keys(limit, keys):
    cache, recent, misses = PlanCache(limit), [], 0
    for key in keys:
        built = []
        cache.get(key, lambda built=built: built.append(1) or object())
        assert bool(built) == (key not in recent)
        misses += len(built)
        recent = [*(k for k in recent if k != key), key][-limit:]
    stats = cache.stats()
    assert (stats.size, stats.misses) == (len(recent), misses)
    assert stats.hits == len(keys) - misses
    assert stats.evictions == misses - len(recent)


def test_a_smaller_limit_evicts_at_once():
    cache = PlanCache()
    for key in range(5):
        cache.get(key, object)
    cache.set_limit(2)
    assert cache.stats() == PlanCacheStats(hits=0, misses=5, evictions=3, size=2, limit=2)
    cache.get(3, never)
    cache.get(4, never)


@pytest.mark.parametrize("limit", [0, -1, 1.0, True, "3", None])
def test_limits_are_positive_ints(limit):
    cache = PlanCache()
    with pytest.raises(ContractError, match="^limit: expected a positive int, got"):
        cache.set_limit(limit)
    assert cache.stats().limit == 128


def test_clear_forgets_plans_and_counters():
    cache = PlanCache()
    cache.get("a", object)
    cache.get("a", never)
    cache.clear()
    assert cache.stats() == PlanCacheStats(hits=0, misses=0, evictions=0, size=0, limit=128)
    cache.get("a", object)


def test_a_failing_build_leaves_no_trace():
    cache = PlanCache()

    def fail():
        raise RuntimeError("no such kernel")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such kernel"):
            cache.get("a", fail)
    assert cache.stats() == PlanCacheStats(hits=0, misses=0, evictions=0, size=0, limit=128)
    assert not cache._building
    cache.get("a", object)
    assert not cache._building


def in_threads(work):
    """Results of ``work(i)`` in 8 threads that start together."""
    barrier = threading.Barrier(NUM_THREADS)

    def run(i):
        barrier.wait(WAIT_S)
        return work(i)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return [f.result(WAIT_S) for f in [pool.submit(run, i) for i in range(NUM_THREADS)]]


def test_eight_threads_one_key_one_build():
    cache, built, slow = PlanCache(), [], threading.Event()

    def build():
        built.append(threading.get_ident())
        slow.wait(0.2)
        return object()

    plans = in_threads(lambda _: cache.get("a", build))
    assert len(built) == 1
    assert len(set(map(id, plans))) == 1
    assert (cache.stats().misses, cache.stats().hits) == (1, 7)


def test_eight_threads_eight_keys_are_not_held_up_by_one_another():
    cache = PlanCache()
    all_building = threading.Barrier(NUM_THREADS)

    def build():
        all_building.wait(WAIT_S)  # passes only while all eight builds run at once
        return object()

    plans = in_threads(lambda i: cache.get(i, build))
    assert len(set(map(id, plans))) == NUM_THREADS


def test_a_found_plan_is_not_held_up_by_a_build():
    cache = PlanCache()
    plan = cache.get("warm", object)
    started, finish = threading.Event(), threading.Event()

    def build():
        started.set()
        assert finish.wait(WAIT_S)
        return object()

    thread = threading.Thread(target=cache.get, args=("cold", build))
    thread.start()
    assert started.wait(WAIT_S)
    assert cache.get("warm", never) is plan
    assert cache.stats().size == 1
    finish.set()
    thread.join(WAIT_S)
    assert cache.stats().size == 2


def test_waiters_of_a_failing_build_build_for_themselves():
    cache, attempts = PlanCache(), []

    def build():
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("the first one fails")
        return object()

    def ask(_):
        try:
            return cache.get("a", build)
        except RuntimeError:
            return None

    plans = [plan for plan in in_threads(ask) if plan is not None]
    assert len(plans) == NUM_THREADS - 1
    assert len(set(map(id, plans))) == 1
    assert len(attempts) == 2


def test_twenty_rounds_of_threads_over_few_keys_with_evictions():
    cache = PlanCache(2)
    for round_ in range(20):
        keys = in_threads(lambda i, r=round_: cache.get((i + r) % 5, lambda k=(i + r) % 5: (k,)))
        assert [key for (key,) in keys] == [(i + round_) % 5 for i in range(NUM_THREADS)]
    assert cache.stats().size == 2
    assert not cache._building
