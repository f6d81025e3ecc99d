# SPDX-License-Identifier: Apache-2.0
"""The processor at hand: launchers are machine code for it."""

from __future__ import annotations

import functools
import platform

_USED_BY_COMPILERS = frozenset(
    (
        *("pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "abm", "bmi1", "bmi2", "movbe", "f16c"),
        *("fma", "avx", "avx2", "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
        *("avx512vbmi", "avx512_vbmi2", "avx512_bitalg", "avx512_vpopcntdq", "gfni"),
    )
)
"""x86 extensions, as Linux names them, for moving, comparing and counting data. Host code does no
more than that, so compilers use no others there."""


@functools.cache
def all_features() -> tuple[str, ...]:
    """Everything that the kernel says of the instruction set, sorted."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            found = next((one for one in lines if one.startswith(("flags", "Features"))), "")
    except OSError:
        found = platform.processor()
    return tuple(sorted(found.partition(":")[2].split() or found.split()))


def code_features() -> tuple[str, ...]:
    """What the host code of a kernel that is compiled here may use."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return all_features()
    return tuple(one for one in all_features() if one in _USED_BY_COMPILERS)


def machine() -> str:
    """Operating system and architecture."""
    return f"{platform.system()} {platform.machine()}"
