# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of many plans ahead, in processes: the DSL compiles one at a time in each.

A worker exports its kernel as an object file; this process loads it into the package's kernel
cache, where the plans find it. Whatever goes wrong here is left to the plans: they compile what
they do not find.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from cudnn_blocks.errors import ContractError, NotServedError
from cudnn_blocks.stages.kernel_cache import KERNELS, KernelBuild
from cudnn_blocks.stages.kernel_store import load_kernel

if TYPE_CHECKING:
    from collections.abc import Iterable

Key = tuple[Any, str]
"""A kernel's config and the name of its target, as in the kernel cache."""


def kernels_of(plans: Iterable[Any]) -> dict[Key, KernelBuild]:
    """The distinct kernels that the plans still lack; a plan that is not served has none."""
    found: dict[Key, KernelBuild] = {}
    for plan in plans:
        try:
            found.update(plan._list_kernels(KERNELS.collecting))
        except (ContractError, NotServedError):
            continue
    return found


def precompile(plans: Iterable[Any], jobs: int) -> str:
    """Fills the kernel cache; returns a line that says what it did.

    Args:
        plans: unchecked plans over meta samples.
        jobs: processes; with fewer than two, nothing is done.
    """
    start = time.monotonic()
    wanted = kernels_of(plans) if jobs > 1 else {}
    if not wanted:
        return "no kernels compiled ahead"
    failed = []
    with (
        TemporaryDirectory() as folder,
        ProcessPoolExecutor(
            min(jobs, len(wanted)), mp_context=get_context("spawn"), initializer=_hide_gpus
        ) as pool,
    ):
        paths = {key: Path(folder) / f"{index}.o" for index, key in enumerate(wanted)}
        futures = {key: pool.submit(_export, build, paths[key]) for key, build in wanted.items()}
        for key, future in futures.items():
            try:
                future.result()
                KERNELS.get(key, partial(load_kernel, paths[key]))
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}"[:200])
    line = f"{len(wanted) - len(failed)} of {len(wanted)} kernels compiled ahead"
    return "; ".join([f"{line} in {time.monotonic() - start:.0f} s", *dict.fromkeys(failed)])


def _hide_gpus() -> None:
    """Workers compile for a named target and leave the device alone."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _export(build: KernelBuild, path: Path) -> None:
    """Compiles one kernel into an object file."""
    kernel = build()
    assert kernel.export is not None, "a kernel that was just compiled can be exported"
    kernel.export(path)
