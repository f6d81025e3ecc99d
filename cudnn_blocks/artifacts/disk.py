# SPDX-License-Identifier: Apache-2.0
"""Object files on disk under a key: whole or not there, one writer, least recently used go first.

An entry is two files, ``<digest>.o`` and ``<digest>.json`` with the key and the checksum of the
first. Both are written beside their place and renamed into it, the object first, so that whatever
a killed process leaves behind does not pass for an entry. Files are private to the user: what is in
them is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import filelock
from pydantic import BaseModel, ConfigDict, ValidationError

GIB = 1 << 30
DEFAULT_LIMIT_BYTES = GIB
LOCK_TIMEOUT_S = 600.0
"""Longer than any compile; past it a process helps itself and stores nothing."""
LEFTOVER_S = 3600.0
"""A file in the making that is older than this was left by a process that died."""
_EVICT_TO = 0.9
_NUM_LOCKS = 256
_PRIVATE_FOLDER, _PRIVATE_FILE = 0o700, 0o600
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class DiskCacheStats:
    """What is on disk now."""

    folder: str
    entries: int
    size_bytes: int
    limit_bytes: int


class _Meta(BaseModel):
    """The second file of an entry."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    key: str
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class _Stored:
    """Files of one digest, an entry or the rest of one."""

    paths: tuple[Path, ...]
    size_bytes: int
    used_at: float


class DiskCache:
    """A folder of entries, shared by processes and threads.

    No method raises when the disk refuses: a read finds nothing, a write stores nothing, and the
    first refusal is told as a RuntimeWarning.

    Args:
        folder: made, private to the user, at the first write.
        limit_bytes: above it the least recently used entries go.
    """

    def __init__(self, folder: Path, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._has_warned = threading.Lock()

    def find(self, key: str) -> Path | None:
        """The object file of ``key``, checked against its checksum; None where there is none."""
        path = self._path(key)
        try:
            if not self._is_private():
                return None
            meta = _Meta.model_validate_json(path.with_suffix(".json").read_bytes())
            data = path.read_bytes()
        except (OSError, ValidationError):
            return None
        found = (len(data), hashlib.sha256(data).hexdigest(), key)
        if found != (meta.size_bytes, meta.sha256, meta.key):
            return None
        with contextlib.suppress(OSError):  # a read-only cache keeps no order
            os.utime(path)
        return path

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[None]:
        """Held by one process and thread at a time for a key; excludes nobody without a disk."""
        name = f"{int(_digest(key)[:8], 16) % _NUM_LOCKS:02x}.lock"
        with contextlib.ExitStack() as held:
            try:
                self._make_folders()
                path = self.folder / "locks" / name
                lock = filelock.FileLock(path, timeout=LOCK_TIMEOUT_S, mode=_PRIVATE_FILE)
                held.enter_context(lock)
            except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
                self._warn(error)
            yield

    def put(self, key: str, write: Callable[[Path], None]) -> bool:
        """Stores what ``write`` writes to the path it is given; False where the disk refuses."""
        path = self._path(key)
        fresh = self.folder / "making" / f"{uuid.uuid4().hex}.o"
        try:
            self._make_folders()
            write(fresh)
            fresh.chmod(_PRIVATE_FILE)
            data = fresh.read_bytes()
            if len(data) > self.limit_bytes:
                return False
            meta = _Meta(key=key, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
            path.parent.mkdir(_PRIVATE_FOLDER, exist_ok=True)
            fresh_meta = fresh.with_suffix(".json")
            _write_private(fresh_meta, meta.model_dump_json().encode())
            os.replace(fresh, path)
            os.replace(fresh_meta, path.with_suffix(".json"))
        except OSError as error:
            self._warn(error)
            return False
        finally:
            for left in (fresh, fresh.with_suffix(".json")):
                with contextlib.suppress(OSError):
                    left.unlink(missing_ok=True)
        self._evict()
        return True

    def is_writable(self) -> bool:
        """Whether there is a folder that this process may write into; makes it if need be."""
        try:
            self._make_folders()
        except OSError:
            return False
        return os.access(self.folder / "making", os.W_OK)

    def drop(self, key: str) -> None:
        """Removes the entry of ``key``."""
        path = self._path(key)
        _remove((path.with_suffix(".json"), path))

    def clear(self) -> DiskCacheStats:
        """Removes every entry; returns what there was. Kernels in use stay loaded."""
        before = self.stats()
        for stored in self._stored():
            _remove(stored.paths)
        self._remove_leftovers(older_than_s=0.0)
        return before

    def stats(self) -> DiskCacheStats:
        """What is on disk now."""
        stored = self._stored()
        size = sum(one.size_bytes for one in stored)
        return DiskCacheStats(str(self.folder), len(stored), size, self.limit_bytes)

    def _path(self, key: str) -> Path:
        digest = _digest(key)
        return self.folder / "objects" / digest[:2] / f"{digest}.o"

    def _make_folders(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for folder in (
            self.folder,
            *(self.folder / name for name in ("objects", "making", "locks")),
        ):
            folder.mkdir(_PRIVATE_FOLDER, exist_ok=True)
        if not self._is_private():
            raise PermissionError(f"{self.folder} can be written by others: what is in it is run")

    def _is_private(self) -> bool:
        """True where nobody else, the superuser aside, could have put files there."""
        found = self.folder.lstat()
        mine = found.st_uid in (os.geteuid(), 0) and stat.S_ISDIR(found.st_mode)
        return mine and not found.st_mode & _OTHERS_WRITE

    def _stored(self) -> list[_Stored]:
        """Every digest on disk, the least recently used first."""
        files: dict[str, list[tuple[Path, os.stat_result]]] = {}
        for path in (self.folder / "objects").glob("*/*.*"):
            with contextlib.suppress(OSError):  # another process removed it meanwhile
                files.setdefault(path.stem, []).append((path, path.stat()))
        stored = [
            _Stored(
                tuple(path for path, _ in own),
                sum(found.st_size for _, found in own),
                max(found.st_mtime for _, found in own),
            )
            for own in files.values()
        ]
        return sorted(stored, key=lambda one: one.used_at)

    def _evict(self) -> None:
        self._remove_leftovers(LEFTOVER_S)
        stored = self._stored()
        size = sum(one.size_bytes for one in stored)
        if size <= self.limit_bytes:
            return
        for one in stored[:-1]:
            if size <= self.limit_bytes * _EVICT_TO:
                break
            _remove(one.paths)
            size -= one.size_bytes

    def _remove_leftovers(self, older_than_s: float) -> None:
        now = time.time()
        for path in (self.folder / "making").glob("*"):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime >= older_than_s:
                    path.unlink()

    def _warn(self, error: Exception) -> None:
        # Never released: the first refusal is told, the others are its consequences.
        if self._has_warned.acquire(blocking=False):
            warnings.warn(
                f"the kernel cache in {self.folder} cannot be written ({error}); compiled kernels "
                "are kept for this process only",
                RuntimeWarning,
                stacklevel=3,
            )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _write_private(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _remove(paths: tuple[Path, ...]) -> None:
    for path in sorted(paths):  # the .json before the .o
        with contextlib.suppress(OSError):
            path.unlink()
