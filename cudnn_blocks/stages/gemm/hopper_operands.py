# SPDX-License-Identifier: Apache-2.0
"""TMA operands of the Hopper GEMM kernel and the layouts that they fill.

Stages of x and w, and the boxes on their way out, hold 128-byte rows with the 128-byte swizzle.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from cudnn_blocks.stages.device.tma import TmaOperand
from cudnn_blocks.stages.gemm.hopper_config import (
    STORE_COLUMNS,
    WARP_ROWS,
    GemmKernelConfig,
)


@dataclass(frozen=True)
class TmaOperands:
    """Everything that moves by TMA."""

    x: TmaOperand
    w: TmaOperand
    y: TmaOperand


def swizzle() -> cute.Swizzle:
    """128-byte swizzle, of the stages and of the boxes on their way out."""
    return cute.make_swizzle(3, 4, 3)


def stages_layout(cfg: GemmKernelConfig, rows: int, num_stages: int | None = None) -> cute.Layout:
    """(ROW, K, STAGE), one 128-byte row after the other."""
    if num_stages is None:
        num_stages = cfg.tile.num_stages
    k_tile = cfg.k_tile
    return cute.make_layout((rows, k_tile, num_stages), stride=(k_tile, 1, rows * k_tile))


def load_operand(mX: cute.Tensor, layout: cute.Layout, box, num_multicast: int) -> TmaOperand:
    """Loads of one stage, or of this CTA's slice of it for the others of its cluster."""
    op = cpasync.CopyBulkTensorTileG2SOp()
    if num_multicast > 1:
        op = cpasync.CopyBulkTensorTileG2SMulticastOp()
    sX = cute.make_composed_layout(swizzle(), 0, cute.select(layout, mode=[0, 1]))
    atom, tensor = cpasync.make_tiled_tma_atom(op, mX, sX, box, num_multicast=num_multicast)
    return TmaOperand(atom, tensor)


def store_operand(mY: cute.Tensor) -> TmaOperand:
    """Stores of a warp's 16 rows by 64 columns."""
    layout = cute.make_layout((STORE_COLUMNS, WARP_ROWS), stride=(1, STORE_COLUMNS))
    sY = cute.make_composed_layout(swizzle(), 0, layout)
    columns_first = cute.make_tensor(mY.iterator, cute.select(mY.layout, mode=[1, 0]))
    op = cpasync.CopyBulkTensorTileS2GOp()
    atom, tensor = cpasync.make_tiled_tma_atom(op, columns_first, sY, (STORE_COLUMNS, WARP_ROWS))
    return TmaOperand(atom, tensor)


@cute.jit
def partition_load(
    tma: TmaOperand,
    sX: cute.Tensor,
    first_row: Int32,
    box: cutlass.Constexpr[tuple[int, int]],
    rank: Int32,
    num_multicast: cutlass.Constexpr[int],
):
    """(BOX, STAGE) of shared memory; (BOX, K_TILE) of the tensor from a row on."""
    gX = cute.local_tile(cute.domain_offset((first_row, 0), tma.tensor), box, (0, None))
    return cpasync.tma_partition(
        tma.atom,
        rank if const_expr(num_multicast > 1) else 0,
        cute.make_layout(num_multicast),
        cute.group_modes(sX, 0, 2),
        cute.group_modes(gX, 0, 2),
    )
