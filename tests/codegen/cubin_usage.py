# SPDX-License-Identifier: Apache-2.0
"""Registers, spills and shared memory of a cubin, as cuobjdump reads them."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "nvidia-cuda-cuobjdump"
_USAGE = re.compile(
    r"Function (?P<name>\S+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+) "
    r"SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)"
)


@dataclass(frozen=True)
class KernelUsage:
    """What one kernel of a cubin takes."""

    name: str
    registers: int
    stack_bytes: int
    """Spills and local arrays of a thread."""
    local_bytes: int
    shared_bytes: int
    """Static shared memory of a CTA."""


@functools.cache
def cuobjdump() -> Path:
    """The tool of the installed package, else of the path; an old one cannot read new targets."""
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("cuobjdump", "cuobjdump.exe"):
            return Path(file.locate())
    found = shutil.which("cuobjdump")
    assert found, (
        f"cuobjdump was not found: pip install '{DISTRIBUTION}>=13' (part of the dev extra), or "
        "put the one of a CUDA 13 toolkit on the PATH. Without it a spill would go unnoticed."
    )
    return Path(found)


def usage_of(cubin: bytes, folder: Path) -> list[KernelUsage]:
    """Every kernel of ``cubin``, which is written to ``folder`` for the tool to read."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    done = subprocess.run(
        [cuobjdump(), "-res-usage", file], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, f"{cuobjdump()} -res-usage failed: {done.stdout}{done.stderr}"
    kernels = [
        KernelUsage(
            name=found["name"],
            registers=int(found["registers"]),
            stack_bytes=int(found["stack"]),
            local_bytes=int(found["local"]),
            shared_bytes=int(found["shared"]),
        )
        for found in _USAGE.finditer(done.stdout + done.stderr)
    ]
    assert kernels, f"no kernel in the output of cuobjdump: {done.stdout}{done.stderr}"
    return kernels
