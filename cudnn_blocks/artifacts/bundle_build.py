# SPDX-License-Identifier: Apache-2.0
"""Builds a bundle: compiles every kernel of some plans, links them, packs them. Needs no GPU."""

from __future__ import annotations

import hashlib
import os
import uuid
import zipfile
from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from cudnn_blocks.api_base import APIBase
from cudnn_blocks.artifacts.bundle import MANIFEST_MEMBER
from cudnn_blocks.artifacts.host import code_features, machine
from cudnn_blocks.artifacts.kernel_key import canonical, source_fingerprint
from cudnn_blocks.artifacts.link import link_library
from cudnn_blocks.artifacts.manifest import (
    FORMAT,
    PACKAGE_DISTRIBUTION,
    BundledKernel,
    BundleManifest,
    versions_of,
)
from cudnn_blocks.artifacts.objects import kernels_of, object_files
from cudnn_blocks.artifacts.warm_up import check_jobs
from cudnn_blocks.errors import ContractError
from cudnn_blocks.stages.kernel_cache import KernelBuild
from cudnn_blocks.stages.kernel_store import TOOLCHAIN, cuda_major

_WRITTEN_AT = (1980, 1, 1, 0, 0, 0)
"""Of every file in the archive: equal kernels make equal bundles."""
_MODE = 0o644 << 16


def build_bundle(
    plans: Iterable[APIBase],
    path: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    progress: bool = True,
) -> BundleManifest:
    """Compiles every kernel of the plans and writes them to one file.

    Kernels that the disk cache has are not compiled again. The file is written beside its place and
    renamed into it.

    Args:
        plans: ops and blocks that were not compiled yet, all for one GPU target.
        path: the bundle, by custom ``*.cbb``; its folder has to be there.
        jobs: worker processes; by default one per available CPU core.
        progress: show a bar on stderr while something compiles.

    Returns:
        What is in the bundle.

    Raises:
        ContractError: plans of several targets, or none with a kernel.
        LifecycleError: a plan is compiled.
        NotServedError: as ``compile()`` of a plan does.
        DriverError: the compiler refused.
        LinkError: there is no linker, or it refuses.
    """
    check_jobs(jobs)
    wanted = kernels_of(plans)
    target = _only_target(wanted)
    path = Path(path)
    with TemporaryDirectory(prefix="cudnn_blocks_") as folder:
        with object_files(wanted, jobs, progress) as objects:
            libraries = _link(objects, Path(folder), jobs or len(os.sched_getaffinity(0)))
        manifest = BundleManifest(
            format=FORMAT,
            target=target,
            cuda=cuda_major(),
            versions=versions_of((PACKAGE_DISTRIBUTION, *TOOLCHAIN)),
            sources=source_fingerprint(),
            machine=machine(),
            cpu_features=list(code_features()),
            kernels=[_entry(key, wanted[key], library) for key, library in libraries.items()],
        )
        _pack(manifest, list(libraries.values()), path)
    return manifest


def _only_target(wanted: Mapping[Hashable, KernelBuild]) -> str:
    names = sorted({build.target.name for build in wanted.values()})
    if len(names) != 1:
        got = f"kernels for {', '.join(names)}" if names else "no kernels"
        raise ContractError("plans", "kernels for one GPU target", got)
    return names[0]


def _link(objects: Mapping[Hashable, Path], folder: Path, jobs: int) -> dict[Hashable, Path]:
    """A shared library of each object file, named by its content."""
    major = cuda_major()

    def link(index: int, path: Path) -> Path:
        linked = folder / f"{index}.so"
        link_library(path, linked, major)
        return linked.rename(folder / f"{_sha256(linked)[:32]}.so")

    with ThreadPoolExecutor(jobs) as pool:
        return dict(
            zip(objects, pool.map(link, range(len(objects)), objects.values()), strict=True)
        )


def _entry(key: Hashable, build: KernelBuild, library: Path) -> BundledKernel:
    return BundledKernel(
        key=canonical(key),
        name=build.kernel,
        member=library.name,
        sha256=_sha256(library),
        size_bytes=library.stat().st_size,
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _pack(manifest: BundleManifest, libraries: Iterable[Path], path: Path) -> None:
    """Writes the archive beside its place and renames it into it."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with zipfile.ZipFile(fresh, "w") as archive:
            text = manifest.model_dump_json(indent=2).encode()
            _write(archive, MANIFEST_MEMBER, text)
            for library in sorted(set(libraries)):
                _write(archive, library.name, library.read_bytes())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _write(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    member = zipfile.ZipInfo(name, _WRITTEN_AT)
    member.external_attr = _MODE
    archive.writestr(member, data)
