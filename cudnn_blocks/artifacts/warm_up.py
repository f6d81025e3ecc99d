# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of many plans before the first request, in worker processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cudnn_blocks.api_base import APIBase, require_type
from cudnn_blocks.artifacts.bundle import loaded_bundles
from cudnn_blocks.artifacts.disk import DiskCache
from cudnn_blocks.artifacts.location import CACHE_VARIABLE, cache_under, disk_cache
from cudnn_blocks.artifacts.refusal import are_compiles_refused
from cudnn_blocks.errors import ContractError
from cudnn_blocks.stages.kernel_cache import KERNELS, CompiledKernel, KernelBuild
from cudnn_blocks.stages.kernel_store import KernelStore

Builds = Mapping[Hashable, Callable[[], CompiledKernel]]


def warm(plans: Iterable[APIBase], *, jobs: int | None = None, progress: bool = True) -> None:
    """Compiles every plan, each distinct kernel once, several at a time.

    The CuTe DSL compiles one kernel at a time in a process; worker processes compile them side by
    side and leave them in the disk cache, or in a temporary folder where there is none. Afterwards
    every plan is compiled, and nothing is left for traffic or for a graph capture.

    Workers are spawned: a program that calls this outside of functions needs the usual
    ``if __name__ == "__main__"``.

    Args:
        plans: ops and blocks, each with its own target.
        jobs: worker processes; by default one per available CPU core, never more than kernels.
        progress: show a bar on stderr while something compiles.

    Raises:
        ContractError, NotServedError, CaptureError, DriverError, CompileRefusedError: as
            ``compile()`` of a plan does.
    """
    plans = list(plans)
    for plan in plans:
        require_type("plans", plan, APIBase)
    check_jobs(jobs)
    wanted: dict[Hashable, Callable[[], CompiledKernel]] = {}
    for plan in plans:
        wanted.update(plan._list_kernels(KERNELS.collecting))
    if are_compiles_refused():  # a plan that lacks a kernel says so
        wanted.clear()
    bundles = loaded_bundles()
    wanted = {
        key: build
        for key, build in wanted.items()
        if not any(bundle.library_of(key) for bundle in bundles)
    }
    with compiled_aside(wanted, jobs, progress) as (stores, missing):
        if stores[-1].cache is not disk_cache():  # whose kernels plans find by themselves
            for key, build in missing.items():
                KERNELS.get(key, partial(_first, stores[-1], key, build))
        for plan in plans:
            plan.compile()


def check_jobs(jobs: int | None) -> None:
    """Raises ContractError unless ``jobs`` is a number of workers or None."""
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise ContractError("jobs", "a positive int or None", repr(jobs))


@contextlib.contextmanager
def compiled_aside(
    wanted: Builds, jobs: int | None, progress: bool
) -> Iterator[tuple[Sequence[KernelStore], Builds]]:
    """Compiles what is on no disk yet in worker processes.

    Yields:
        Where kernels are now, the folder of the new ones last, and what there was to compile. What
        the workers have failed at is in no store.
    """
    with _folder() as cache:
        folders = dict.fromkeys((disk_cache(), cache))
        stores = [KernelStore(one) for one in folders if one is not None]
        missing = {
            key: build
            for key, build in wanted.items()
            if not any(store.has(key) for store in stores)
        }
        with _bar(progress and bool(missing), len(missing)) as step:
            _compile_aside(missing, cache, jobs or len(os.sched_getaffinity(0)), step)
            yield stores, missing


def _compile_aside(builds: Builds, cache: DiskCache, jobs: int, step: Callable[[], None]) -> None:
    """Fills ``cache`` from worker processes; what fails is left to the plan, which says why."""
    able = {key: build for key, build in builds.items() if isinstance(build, KernelBuild)}
    jobs = min(jobs, len(able))
    if jobs < 2:  # a worker would start for longer than it helps
        return
    pool = ProcessPoolExecutor(
        jobs, mp_context=get_context("spawn"), initializer=_set_up_worker, initargs=(cache.folder,)
    )
    try:
        futures = [pool.submit(_compile, key, build) for key, build in able.items()]
        for future in as_completed(futures):
            with contextlib.suppress(Exception):
                future.result()
            step()
    finally:
        pool.shutdown(cancel_futures=True)


def _set_up_worker(folder: Path) -> None:
    """Workers compile for named targets and leave the GPUs alone."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ[CACHE_VARIABLE] = str(folder.parent)


def _compile(key: Hashable, build: KernelBuild) -> None:
    KERNELS.get(key, build)


def _first(
    store: KernelStore, key: Hashable, build: Callable[[], CompiledKernel]
) -> CompiledKernel:
    return store.get(key, build)[0]


@contextlib.contextmanager
def _folder() -> Iterator[DiskCache]:
    """The disk cache, or one in a temporary folder where none can be written."""
    cache = disk_cache()
    if cache is not None and cache.is_writable():
        yield cache
    else:
        with TemporaryDirectory(prefix="cudnn_blocks_") as folder:
            yield cache_under(Path(folder))


@contextlib.contextmanager
def _bar(is_shown: bool, total: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not is_shown) as bar:
        task = bar.add_task("compiling kernels", total=total)
        yield partial(bar.advance, task)
        bar.update(task, completed=total)  # those that this process compiled itself
