# SPDX-License-Identifier: Apache-2.0
"""Instructions of a cubin, as cuobjdump and nvdisasm print them."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

from tests.codegen.cubin_usage import cuobjdump

_INSTRUCTION = re.compile(
    r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(?P<opcode>[A-Z][A-Z0-9_]*)", re.M
)
_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.+?) *;", re.M)
_KERNEL = re.compile(r"^\s*Function : \S+$", re.M)


def opcodes_of(cubin: bytes, folder: Path) -> Counter[str]:
    """How often each opcode occurs, modifiers left out."""
    listing = _listing(cubin, folder)
    opcodes = Counter(found["opcode"] for found in _INSTRUCTION.finditer(listing))
    assert opcodes["EXIT"], f"no instruction in the output of cuobjdump: {listing[:2000]}"
    return opcodes


def kernels_of(cubin: bytes, folder: Path) -> list[tuple[str, ...]]:
    """The instructions of each kernel, operands and modifiers included."""
    _, *kernels = _KERNEL.split(_listing(cubin, folder))
    found = [tuple(_LINE.findall(kernel)) for kernel in kernels]
    assert found, "no kernel in the output of cuobjdump"
    assert all(found), "a kernel without instructions in the output of cuobjdump"
    return found


def _listing(cubin: bytes, folder: Path) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    done = subprocess.run(
        [cuobjdump(), "-sass", file], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, f"{cuobjdump()} -sass failed: {done.stdout}{done.stderr}"
    return done.stdout
