# SPDX-License-Identifier: Apache-2.0
"""KernelCache: one compile per key, one at a time; failures are typed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cudnn_blocks import DriverError, Target
from cudnn_blocks.stages.kernel_cache import (
    CompiledKernel,
    KernelCache,
    KernelCacheStats,
    compile_kernel,
)

NUM_THREADS = 8
WAIT_S = 20


def in_threads(work):
    barrier = threading.Barrier(NUM_THREADS)

    def run(i):
        barrier.wait(WAIT_S)
        return work(i)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return [f.result(WAIT_S) for f in [pool.submit(run, i) for i in range(NUM_THREADS)]]


def test_one_compile_per_key_under_threads():
    cache, compiled = KernelCache(), []

    def build():
        compiled.append(1)
        return CompiledKernel(None)

    kernels = in_threads(lambda _: cache.get("a", build))
    assert len(compiled) == 1
    assert len(set(map(id, kernels))) == 1
    assert cache.stats().compiled == 1


def test_compiles_never_overlap():
    cache, running, most = KernelCache(), [], []

    def build():
        running.append(1)
        most.append(len(running))
        threading.Event().wait(0.02)
        running.pop()
        return CompiledKernel(None)

    in_threads(lambda i: cache.get(i, build))
    assert most == [1] * NUM_THREADS
    assert cache.stats() == KernelCacheStats(compiled=NUM_THREADS, found=0)


def test_found_kernels_are_counted():
    cache = KernelCache()
    kernel = cache.get("a", lambda: CompiledKernel(None))
    assert cache.get("a", lambda: CompiledKernel(None)) is kernel
    assert cache.stats() == KernelCacheStats(compiled=1, found=1)


def test_a_failing_build_leaves_no_trace():
    cache = KernelCache()

    def fail():
        raise DriverError("refused")

    with pytest.raises(DriverError, match="refused"):
        cache.get("a", fail)
    assert cache.stats() == KernelCacheStats(compiled=0, found=0)
    cache.get("a", lambda: CompiledKernel(None))


def test_a_compiler_error_is_a_driver_error_that_chains_it(monkeypatch):
    from cutlass import cute

    class SomeKernel:
        pass

    def refuse(*_args, **_kwargs):
        raise ValueError("ptxas says no")

    monkeypatch.setattr(cute, "compile", refuse)
    with pytest.raises(DriverError, match="SomeKernel: the CuTe DSL could not .* sm_80") as error:
        compile_kernel(SomeKernel(), (), Target.parse("sm_80"))
    assert isinstance(error.value.__cause__, ValueError)
