# SPDX-License-Identifier: Apache-2.0
"""The object files of every kernel that some plans launch."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from cudnn_blocks.api_base import APIBase, require_type
from cudnn_blocks.artifacts.warm_up import compiled_aside
from cudnn_blocks.errors import DriverError, LifecycleError
from cudnn_blocks.stages.kernel_cache import KERNELS, KernelBuild
from cudnn_blocks.stages.kernel_store import KernelStore


def kernels_of(plans: Iterable[APIBase]) -> dict[Hashable, KernelBuild]:
    """Every kernel that the plans launch, whether or not this process has it.

    Raises:
        LifecycleError: a plan is compiled, and so no longer says what it is made of.
        ContractError, NotServedError: as ``check_support()`` of a plan does.
    """
    wanted: dict[Hashable, KernelBuild] = {}
    for plan in plans:
        require_type("plans", plan, APIBase)
        if plan._compiled:
            raise LifecycleError(f"{plan.op_name}: pass a plan that is not compiled yet")
        wanted.update(plan._list_kernels(partial(KERNELS.collecting, lists_all=True)))
    return wanted


@contextlib.contextmanager
def object_files(
    wanted: Mapping[Hashable, KernelBuild], jobs: int | None, progress: bool
) -> Iterator[dict[Hashable, Path]]:
    """Compiles what is on no disk yet; the files are there within the context.

    Raises:
        DriverError: the compiler refused, or there is no disk to write to.
    """
    with compiled_aside(wanted, jobs, progress) as (stores, _):
        yield {key: _object_of(key, build, stores) for key, build in wanted.items()}


def _object_of(key: Hashable, build: KernelBuild, stores: Sequence[KernelStore]) -> Path:
    """Compiled now, where the workers have not, so that errors are seen."""
    for is_compiled in (False, True):
        if is_compiled:
            stores[-1].get(key, build)
        for store in stores:
            path = store.object_of(key)
            if path is not None:
                return path
    raise DriverError(
        f"{build.kernel}: its object file is in no cache: no disk takes it, or sources were edited "
        "meanwhile"
    )
