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


def opcodes_of(cubin: bytes, folder: Path) -> Counter[str]:
    """How often each opcode occurs, modifiers left out."""
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    done = subprocess.run(
        [cuobjdump(), "-sass", file], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, f"{cuobjdump()} -sass failed: {done.stdout}{done.stderr}"
    opcodes = Counter(found["opcode"] for found in _INSTRUCTION.finditer(done.stdout))
    assert opcodes["EXIT"], f"no instruction in the output of cuobjdump: {done.stdout[:2000]}"
    return opcodes
