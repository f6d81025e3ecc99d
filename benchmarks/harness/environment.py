# SPDX-License-Identifier: Apache-2.0
"""Where a run happened: device, versions, commit, clocks. Read only."""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cudnn_blocks.errors import CudaUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[2]
TORCH_CUDNN = "torch-cudnn"
"""Stands among the peers for the cuDNN that torch uses, wherever it comes from."""
COMMIT_VARIABLE = "CUDNN_BLOCKS_BENCH_COMMIT"


def require_gpu() -> torch.cuda._CudaDeviceProperties:
    """The current device's properties, or CudaUnavailableError."""
    if not torch.cuda.is_available():
        raise CudaUnavailableError(
            "benchmarks time a CUDA device and torch sees none; use --list to see the cases"
        )
    return torch.cuda.get_device_properties(torch.cuda.current_device())


def version_of(distribution: str) -> str | None:
    """Installed version, or None."""
    if distribution == TORCH_CUDNN:
        version = torch.backends.cudnn.version()
        return None if version is None else str(version)
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def peer_versions(distributions: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Peer packages: installed ones with their versions, missing ones with the reason."""
    versions = {name: version_of(name) for name in distributions}
    found = {name: version for name, version in versions.items() if version}
    return found, {name: "not installed" for name in versions if name not in found}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    """The variable's value; else HEAD, ``-dirty`` where files other than results differ."""
    named = os.environ.get(COMMIT_VARIABLE)
    if named:
        return named
    head = _output("git", "rev-parse", "HEAD") if (ROOT / ".git").exists() else None
    if head is None:
        return "unknown"
    changed = _output("git", "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return f"{head}-dirty" if changed else head


def _nvidia_smi(field: str) -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    which = f"GPU-{uuid}" if uuid else str(torch.cuda.current_device())
    return _output(
        "nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i", which
    )


def driver() -> str | None:
    """Driver version."""
    return _nvidia_smi("driver_version")


def sm_clock_mhz() -> int | None:
    """Current SM clock."""
    text = _nvidia_smi("clocks.sm")
    return int(text) if text and text.isdigit() else None
