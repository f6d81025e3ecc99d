# SPDX-License-Identifier: Apache-2.0
"""What a bundle says of itself, and what of it has to hold where it is loaded."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Iterable
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from cudnn_blocks.artifacts.host import all_features, machine
from cudnn_blocks.artifacts.kernel_key import source_fingerprint
from cudnn_blocks.errors import BundleError, ContractError
from cudnn_blocks.target import Target

FORMAT = 1
PACKAGE_DISTRIBUTION = "cudnn_blocks"
NOT_INSTALLED = "none"


class BundledKernel(BaseModel):
    """One shared library of a bundle."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    key: str
    """Canonical text of the specialisation: config and target."""
    name: str
    """Of the kernel class."""
    member: str
    """Name of the library in the bundle."""
    sha256: str
    size_bytes: int


class BundleManifest(BaseModel):
    """``manifest.json`` of a bundle."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: int
    target: str
    cuda: str
    """Major version of the CUDA runtime that the launchers call."""
    versions: dict[str, str]
    """Distribution to version, of what made the kernels."""
    sources: str
    """Fingerprint of the package's kernel sources."""
    machine: str
    cpu_features: list[str]
    """Of the instruction set, which launchers may use."""
    kernels: list[BundledKernel]

    def check(self, path: Path) -> None:
        """Raises BundleError for the first field that does not fit this process."""
        for name, version in self.versions.items():
            here = installed_version(name)
            if here not in (version, NOT_INSTALLED):  # what only compiles need not be here
                raise BundleError(path, name, f"version {here}, which is installed", version)
        facts = {"sources": source_fingerprint(), "machine": machine()}
        for name, here in facts.items():
            if getattr(self, name) != here:
                raise BundleError(path, name, here, getattr(self, name))
        missing = sorted(set(self.cpu_features).difference(all_features()))
        if missing:
            got = f"launchers that may use {', '.join(missing)}, which this processor lacks"
            raise BundleError(path, "cpu_features", "those of this processor", got)
        present = sorted(present_targets())
        if present and self.target not in present:
            expected = f"{', '.join(present)}, the GPUs of this process"
            raise BundleError(path, "target", expected, self.target)
        self._load_cuda_runtime(path)

    def _load_cuda_runtime(self, path: Path) -> None:
        """Makes torch's CUDA runtime visible to the libraries; a torch without CUDA has none."""
        if torch.version.cuda is None:
            return
        major = torch.version.cuda.partition(".")[0]
        if major != self.cuda:
            raise BundleError(path, "cuda", f"{major}, which torch is built with", self.cuda)
        name = f"libcudart.so.{major}"
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise BundleError(path, "cuda", f"a process with {name}", str(error)) from error


def installed_version(distribution: str) -> str:
    """Version of a distribution here, or ``none``."""
    if distribution == PACKAGE_DISTRIBUTION:
        from cudnn_blocks import __version__

        return __version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def present_targets() -> set[str]:
    """Target names of the GPUs of this process."""
    if not torch.cuda.is_available():
        return set()
    return {_target_name(index) for index in range(torch.cuda.device_count())}


def _target_name(index: int) -> str:
    try:
        return Target.of_device(torch.device("cuda", index)).name
    except ContractError as error:  # an architecture that nothing here compiles for
        return str(error.got)


def versions_of(distributions: Iterable[str]) -> dict[str, str]:
    """Distribution to version, of those that are installed."""
    found = {name: installed_version(name) for name in distributions}
    return {name: version for name, version in found.items() if version != NOT_INSTALLED}
