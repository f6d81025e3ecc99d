# SPDX-License-Identifier: Apache-2.0
"""Makes a shared library of a kernel's object file, so that it loads without the CuTe DSL."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from cudnn_blocks.errors import LinkError

COMPILER_VARIABLE = "CC"
_SHIM = Path(__file__).with_name("runtime_shim.c")
_STATIC_RUNTIME = "libcuda_dialect_runtime_static.a"
_FLAGS = (
    *("-shared", "-fPIC", "-O2", "-s"),
    "-Wl,--exclude-libs,ALL,-Bsymbolic",  # two kernels in a process share no runtime by accident
    "-Wl,-z,lazy",  # the CUDA runtime is the process's, and not there without a GPU
    "-Wl,-z,defs,--warn-unresolved-symbols",  # told, so that they can be looked at
)
_UNRESOLVED = re.compile(r"undefined (?:reference to|symbol:?) [`'\"]?(\w+)")
_LEFT_TO_THE_PROCESS = re.compile(r"cuda[A-Z]\w*|TVMFFI\w+")
_TIMEOUT_S = 120


def link_library(objects: Path, library: Path, cuda_major: str) -> None:
    """Links one object file with the DSL's static runtime.

    Args:
        objects: what ``CompiledKernel.export`` has written.
        library: the file to write.
        cuda_major: major version of the CUDA toolkit that the DSL compiles with.

    Raises:
        LinkError: there is no C compiler or no static runtime, or they refuse.
    """
    inputs = (_SHIM, objects, static_runtime(cuda_major))
    command = [*_compiler(), *_FLAGS, "-o", str(library), *map(str, inputs)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LinkError(f"{command[0]}: {error}") from error
    unresolved = set(_UNRESOLVED.findall(done.stderr))
    missing = sorted(name for name in unresolved if not _LEFT_TO_THE_PROCESS.fullmatch(name))
    if done.returncode or missing:
        said = f"nothing defines {', '.join(missing)}" if missing else done.stderr.strip()[-2000:]
        raise LinkError(f"{command[0]} could not link a kernel: {said}")


def static_runtime(cuda_major: str) -> Path:
    """The DSL's static runtime library; LinkError where it is not installed."""
    distribution = f"nvidia-cutlass-dsl-libs-cu{cuda_major}"
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == _STATIC_RUNTIME:
            return Path(str(file.locate()))
    raise LinkError(f"{_STATIC_RUNTIME} of {distribution} is not installed")


def _compiler() -> list[str]:
    asked = shlex.split(os.environ.get(COMPILER_VARIABLE, "")) or ["cc"]
    found = shutil.which(asked[0])
    if found is None:
        raise LinkError(
            f"linking a bundle needs a C compiler and linker, and {asked[0]!r} is not on the PATH: "
            f"install one (Debian: gcc), or name it in {COMPILER_VARIABLE}"
        )
    return [found, *asked[1:]]
