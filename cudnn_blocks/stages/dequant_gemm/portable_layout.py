# SPDX-License-Identifier: Apache-2.0
"""What both kernels of few rows share: the scale blob, the step along K, sizes in bytes."""

BLOB_TILE = 128
"""Weight rows of a tile of the scale blob."""
BLOB_ROWS, BLOB_COLUMNS = 32, 4
"""Of 16 bytes a row: a tile has 4 words of 4 scales, of rows 32 apart, beside each other."""
COLUMN_BYTES = BLOB_TILE * BLOB_COLUMNS
"""A column of tiles is 4 scales wide."""
STEP = 128
"""Elements of K that a warp takes at a time: whole columns of blob tiles."""
WARP_THREADS = 32
VECTOR_BYTES = 16
ACTIVATION_BYTES = 2
FLOAT_BYTES = 4
PREFETCH_BYTES = 96 << 10
"""Codes of a CTA up to which they are all asked into L2 ahead; more were slower."""
STORE = 4
"""Neighbouring outputs of a thread."""


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)
