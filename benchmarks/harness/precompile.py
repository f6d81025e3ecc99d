# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of many plans ahead, in processes: the DSL compiles one at a time in each.

A worker exports its kernel as an object file; this process links it and puts it into the package's
kernel cache, where the plans find it. Whatever goes wrong here is left to the plans: they compile
what they do not find.
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
from cudnn_blocks.stages.cudnn_graph import CUDNN
from cudnn_blocks.stages.kernel_cache import KERNELS, CompiledKernel
from cudnn_blocks.stages.kernel_stage import KernelChoice, KernelStage
from cudnn_blocks.stages.stage import REFERENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

FUNCTION = "benchmarked_kernel"
Key = tuple[Any, str]
"""A kernel's config and the name of its target, as in the kernel cache."""

_linked: list[Any] = []
"""Modules behind the kernels; they live as long as the process."""


def kernels_of(plans: Iterable[Any]) -> dict[Key, KernelChoice]:
    """The distinct kernels of the plans; a plan that is not served has none."""
    found: dict[Key, KernelChoice] = {}
    for plan in plans:
        try:
            plan.check_support()
        except (ContractError, NotServedError):
            continue
        for choice, target in _choices(plan):
            found.setdefault((choice.config, target), choice)
    return found


def _choices(plan: Any) -> Iterator[tuple[KernelChoice, str]]:
    """Each kernel and its target's name; a plan whose stages share a launch names it itself."""
    if hasattr(plan, "kernel_choices"):
        yield from plan.kernel_choices()
        return
    for stage in plan._stages:
        if isinstance(stage, KernelStage) and stage.engine not in (REFERENCE, CUDNN):
            yield stage._choose_kernel(), stage.target.name


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
        paths = {key: str(Path(folder) / f"{index}.o") for index, key in enumerate(wanted)}
        futures = {
            key: pool.submit(_export, choice, key[1], paths[key]) for key, choice in wanted.items()
        }
        for key, future in futures.items():
            try:
                future.result()
                KERNELS.get(key, partial(_link, paths[key]))
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}"[:200])
    line = f"{len(wanted) - len(failed)} of {len(wanted)} kernels compiled ahead"
    return "; ".join([f"{line} in {time.monotonic() - start:.0f} s", *dict.fromkeys(failed)])


def _hide_gpus() -> None:
    """Workers compile for a named target and leave the device alone."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _export(choice: KernelChoice, target: str, path: str) -> None:
    """Compiles one kernel into an object file, with the options of the kernel cache."""
    from cutlass import cute

    compiled = cute.compile(
        choice.kernel(choice.config),
        *choice.fake_operands(choice.config),
        cute.runtime.make_fake_stream(),
        options=f"--enable-tvm-ffi --gpu-arch {target}",
    )
    compiled.export_to_c(path, FUNCTION)


def _link(path: str) -> CompiledKernel:
    """The kernel of an object file."""
    import tvm_ffi
    from cutlass import cute

    module = cute.runtime.load_module(path, enable_tvm_ffi=True)
    _linked.append(module)
    call: Callable[..., object] = tvm_ffi.Function.__call__.__get__(module[FUNCTION])
    return CompiledKernel(call)
