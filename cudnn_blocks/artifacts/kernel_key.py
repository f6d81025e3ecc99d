# SPDX-License-Identifier: Apache-2.0
"""Keys that mean the same in every process: everything that a compiled kernel depends on."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cudnn_blocks.artifacts.host import all_features, machine

PACKAGE = "cudnn_blocks"
KERNEL_SOURCES = ("stages", "geometry", "target.py", "quant_spec.py")
"""Files and folders of the package that a kernel's code can come from."""
_KNOWN_SOURCES = (f"{PACKAGE}.", "cutlass.")
"""Modules whose code the key covers, by fingerprint or by version."""
_PLAIN = (str, int, bool, bytes, type(None))


class UnstableKeyError(TypeError):
    """A key holds something that another process would spell, or mean, differently."""


def canonical(value: Any) -> str:
    """A text that is equal in two processes exactly where the values are.

    Raises:
        UnstableKeyError: for objects that have no such text, and for code outside this package.
    """
    kind = type(value)
    if kind in _PLAIN:
        return repr(value)
    if kind is float:
        return value.hex()  # type: ignore[no-any-return]
    if isinstance(value, enum.Enum):
        return f"{_code_name(kind)}.{value.name}"
    if kind in (tuple, list):
        return f"{kind.__name__}({','.join(map(canonical, value))})"
    if kind in (frozenset, set):
        return f"{kind.__name__}({','.join(sorted(map(canonical, value)))})"
    if kind is dict:
        return f"dict({','.join(sorted(map(canonical, value.items())))})"
    if dataclasses.is_dataclass(kind):
        fields = (
            f"{one.name}={canonical(getattr(value, one.name))}" for one in dataclasses.fields(value)
        )
        return f"{_code_name(kind)}({','.join(fields)})"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"<{_code_name(value)}>"
    raise UnstableKeyError(f"{kind.__qualname__} cannot be part of a key on disk")


def _code_name(code: Any) -> str:
    name = f"{code.__module__}.{code.__qualname__}"
    if "<" in name or not name.startswith(_KNOWN_SOURCES):
        raise UnstableKeyError(f"{name}: only kernels of {PACKAGE} are kept on disk")
    return name


def kernel_key(specialisation: object, compiler: Mapping[str, str]) -> str:
    """The key of one kernel.

    Args:
        specialisation: config and target, as in the kernel cache of a process.
        compiler: versions and options of what compiles it.

    Raises:
        UnstableKeyError: as ``canonical`` does, and where sources were edited after this process
            has begun to import them: what it compiles is then neither the old nor the new.
    """
    if _stamp_of(_PACKAGE_FOLDER) != _STAMP:
        raise UnstableKeyError("sources have changed since this process imported them")
    facts = {
        **compiler,
        "sources": source_fingerprint(),
        "host": host_fingerprint(),
        "specialisation": canonical(specialisation),
    }
    return "\n".join(f"{name}: {value}" for name, value in sorted(facts.items()))


@functools.cache
def source_fingerprint() -> str:
    """Hash of every file of the package that kernels are made from."""
    return fingerprint_of(_PACKAGE_FOLDER)


def fingerprint_of(package: Path) -> str:
    """The same for the package in that folder; its names count, its place does not.

    Raises:
        UnstableKeyError: the sources are not there.
    """
    found = hashlib.sha256()
    for path in _sources_of(package):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UnstableKeyError(f"{path} cannot be read: {error}") from error
        found.update(f"{path.relative_to(package).as_posix()} {len(data)}\n".encode())
        found.update(data)
    return found.hexdigest()


def _sources_of(package: Path) -> list[Path]:
    found = []
    for name in KERNEL_SOURCES:
        root = package / name
        paths = [root] if root.is_file() else sorted(root.rglob("*.py"))
        if not paths:
            raise UnstableKeyError(f"no sources in {root}")
        found += paths
    return found


def _stamp_of(package: Path) -> object:
    """Changes whenever a source is written; None where there are none."""
    try:
        return [
            (path, path.stat().st_mtime_ns, path.stat().st_size) for path in _sources_of(package)
        ]
    except (OSError, UnstableKeyError):
        return None


@functools.cache
def host_fingerprint() -> str:
    """Instruction set of the host: launchers are machine code for the processor at hand."""
    digest = hashlib.sha256(" ".join(all_features()).encode()).hexdigest()
    return f"{machine()} {digest[:16]}"


_PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
_STAMP = _stamp_of(_PACKAGE_FOLDER)
"""Taken as the kernel cache is imported, which is before any kernel is."""
