# SPDX-License-Identifier: Apache-2.0
"""Scale blobs in the F8_128x4 order, as block-scaled matrix units read them.

Rows are padded to 128 and scales of a row to 4; a padded array ``[R, C]``, seen as
``[R / 128, 4, 32, C / 4, 4]`` with the axes ``(rt, rg, rr, ct, cc)``, lies in memory in the order
``(rt, ct, rr, rg, cc)``. Padding bytes are written as 0x00 and never read for a result.
"""

from __future__ import annotations

import torch

TILE_ROWS = 128
ROW_GROUPS = 4
TILE_SCALES = 4


def padded_extents(rows: int, scales: int) -> tuple[int, int]:
    """Rows and scales of a row, with their padding."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-scales // TILE_SCALES) * TILE_SCALES


def blob_bytes(rows: int, scales: int) -> int:
    """Bytes of the blob of ``rows`` rows with ``scales`` scales each."""
    padded_rows, padded_scales = padded_extents(rows, scales)
    return padded_rows * padded_scales


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """The blobs of ``[..., R, C]`` scales.

    Args:
        scales: of any dtype of one byte.

    Returns:
        ``[..., blob_bytes(R, C)]``, uint8.
    """
    codes = scales.view(torch.uint8)
    *outer, rows, columns = codes.shape
    padded = codes.new_zeros(*outer, *padded_extents(rows, columns))
    padded[..., :rows, :columns] = codes
    tiles = padded.unflatten(-1, (-1, TILE_SCALES)).unflatten(-3, (-1, ROW_GROUPS, 32))
    blobs: torch.Tensor = tiles.movedim(-2, -4).transpose(-3, -2).flatten(-5)
    return blobs


def unpack_scales(blobs: torch.Tensor, rows: int, scales: int) -> torch.Tensor:
    """The ``[..., rows, scales]`` codes, uint8, of ``[..., blob_bytes(rows, scales)]`` blobs."""
    padded_rows, padded_scales = padded_extents(rows, scales)
    tiles = blobs.view(torch.uint8).unflatten(
        -1,
        (padded_rows // TILE_ROWS, padded_scales // TILE_SCALES, 32, ROW_GROUPS, TILE_SCALES),
    )
    padded = tiles.transpose(-3, -2).movedim(-4, -2).flatten(-5, -3).flatten(-2)
    found: torch.Tensor = padded[..., :rows, :scales]
    return found
