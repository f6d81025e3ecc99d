# SPDX-License-Identifier: Apache-2.0
"""Registers, spills and shared memory of compiled kernels, read from the device code itself."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from cudnn_blocks.api_base import APIBase
from cudnn_blocks.artifacts.objects import kernels_of, object_files
from cudnn_blocks.errors import DriverError
from cudnn_blocks.support import KernelReport

_ELF = b"\x7fELF"
_EM_CUDA = 190
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_ATTRIBUTE = struct.Struct("<BBH")
_NUMBER_OF_SYMBOL = struct.Struct("<II")
_SIZED = 4
"""Format of an attribute whose value follows; the others hold it in 16 bits."""
_FRAME_BYTES, _REGISTERS = 0x11, 0x2F
"""Attributes of ``.nv.info``, as cuobjdump names them EIATTR_FRAME_SIZE and EIATTR_REGCOUNT."""
_INFO, _SHARED, _TEXT = ".nv.info", ".nv.shared.", ".text."


class _Section(NamedTuple):
    name: str
    start: int
    size: int


def kernel_usage(plan: APIBase) -> list[KernelReport]:
    """What every kernel that the plan launches takes; compiles those that are on no disk.

    Raises:
        DriverError: the compiler refused, or its output cannot be read.
    """
    wanted = kernels_of([plan])
    with object_files(wanted, None, progress=False) as objects:
        return [report for path in objects.values() for report in usage_of(path.read_bytes())]


def usage_of(data: bytes) -> list[KernelReport]:
    """The kernels of an object file, or of a cubin.

    Raises:
        DriverError: no device code was found in it.
    """
    found = [report for cubin in _cubins(data) for report in _read(cubin)]
    if not found:
        raise DriverError("no device code was found in a compiled kernel")
    return found


def _cubins(data: bytes) -> Iterator[bytes]:
    """What starts with the header of an ELF file for CUDA."""
    start = data.find(_ELF)
    while start >= 0:
        if len(data) - start > _HEADER.size and _HEADER.unpack_from(data, start)[2] == _EM_CUDA:
            yield data[start:]
        start = data.find(_ELF, start + 1)


def _read(cubin: bytes) -> list[KernelReport]:
    sections = {section.name: section for section in _sections(cubin)}
    symbols, names = sections[".symtab"], sections[".strtab"]
    numbers: dict[str, dict[int, int]] = {}
    for attribute, value in _attributes(cubin, sections[_INFO]):
        if attribute in (_FRAME_BYTES, _REGISTERS):
            symbol, number = _NUMBER_OF_SYMBOL.unpack_from(cubin, value)
            name, *_ = _SYMBOL.unpack_from(cubin, symbols.start + symbol * _SYMBOL.size)
            numbers.setdefault(_text(cubin, names.start + name), {})[attribute] = number
    return [
        KernelReport(
            kernel=name,
            registers=found[_REGISTERS],
            spill_bytes=found.get(_FRAME_BYTES, 0),
            static_smem_bytes=sections[_SHARED + name].size if _SHARED + name in sections else 0,
        )
        for name, found in numbers.items()
        if _TEXT + name in sections and _REGISTERS in found
    ]


def _sections(cubin: bytes) -> Iterator[_Section]:
    header = _HEADER.unpack_from(cubin)
    table, count, names = header[6], header[12], header[13]
    rows = [_SECTION.unpack_from(cubin, table + index * _SECTION.size) for index in range(count)]
    for name, _, _, _, start, size, *_ in rows:
        yield _Section(_text(cubin, rows[names][4] + name), start, size)


def _attributes(cubin: bytes, section: _Section) -> Iterator[tuple[int, int]]:
    """Attribute and the place of its value, of those that have a sized one."""
    place, end = section.start, section.start + section.size
    while place < end:
        form, attribute, size = _ATTRIBUTE.unpack_from(cubin, place)
        place += _ATTRIBUTE.size
        if form == _SIZED:
            yield attribute, place
            place += size


def _text(cubin: bytes, start: int) -> str:
    return cubin[start : cubin.index(b"\0", start)].decode()
