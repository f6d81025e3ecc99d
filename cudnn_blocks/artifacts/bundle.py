# SPDX-License-Identifier: Apache-2.0
"""Bundles: compiled kernels in one file, taken from it by the plans of a process.

A bundle is a ZIP archive of ``manifest.json`` and one shared library for each kernel. It is code:
loading it is running what its maker has put there.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
import zlib
from collections.abc import Hashable
from pathlib import Path

from pydantic import ValidationError

from cudnn_blocks.artifacts.kernel_key import UnstableKeyError, canonical
from cudnn_blocks.artifacts.manifest import FORMAT, BundleManifest
from cudnn_blocks.errors import BundleError

BUNDLE_VARIABLE = "CUDNN_BLOCKS_BUNDLE"
"""A bundle that is loaded before the first kernel is compiled."""
MANIFEST_MEMBER = "manifest.json"


class Bundle:
    """A bundle that was checked and fits this process.

    Args:
        path: of the file.

    Raises:
        BundleError: it cannot be read, is damaged, or was made for something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self.manifest = self._read_manifest(archive)
                self.manifest.check(path)
                self._libraries = {
                    one.key: self._read(archive, one.member, one.sha256, one.size_bytes)
                    for one in self.manifest.kernels
                }
        except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, KeyError) as error:
            raise BundleError(path, "file", "a bundle", str(error)) from error

    def library_of(self, specialisation: Hashable) -> bytes | None:
        """The shared library of a kernel; None where the bundle has none.

        Args:
            specialisation: key of the kernel cache.
        """
        try:
            return self._libraries.get(canonical(specialisation))
        except UnstableKeyError:  # somebody else's kernel
            return None

    def _read_manifest(self, archive: zipfile.ZipFile) -> BundleManifest:
        data = archive.read(MANIFEST_MEMBER)
        try:
            manifest = BundleManifest.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or MANIFEST_MEMBER
            raise BundleError(self.path, field, first["msg"], first["input"]) from error
        if manifest.format != FORMAT:
            raise BundleError(self.path, "format", FORMAT, manifest.format)
        return manifest

    def _read(self, archive: zipfile.ZipFile, member: str, sha256: str, size_bytes: int) -> bytes:
        try:
            data = archive.read(member)
        except (zipfile.BadZipFile, zlib.error, KeyError) as error:
            raise BundleError(self.path, member, "what was written", str(error)) from error
        found = hashlib.sha256(data).hexdigest()
        if (found, len(data)) != (sha256, size_bytes):
            expected = f"sha256 {sha256} of {size_bytes} bytes"
            raise BundleError(self.path, member, expected, f"{found} of {len(data)} bytes")
        return data


_lock = threading.Lock()
_bundles: list[Bundle] = []
_asked_by_environment: str | None = None


def load_bundle(path: str | os.PathLike[str]) -> Bundle:
    """From now on plans of this process take their kernels from the bundle, where it has them.

    A bundle is code: load only what you have made, or would run. Several may be loaded.

    Args:
        path: what ``python -m cudnn_blocks compile`` has written.

    Raises:
        BundleError: it is damaged, or made for something else; the field is named.
    """
    bundle = Bundle(Path(path))
    with _lock:
        _bundles.append(bundle)
    return bundle


def loaded_bundles() -> tuple[Bundle, ...]:
    """The bundles of this process, the one that the environment names among them."""
    global _asked_by_environment
    asked = os.environ.get(BUNDLE_VARIABLE)
    with _lock:
        if asked and asked != _asked_by_environment:
            _bundles.append(Bundle(Path(asked)))
            _asked_by_environment = asked
        return tuple(_bundles)
