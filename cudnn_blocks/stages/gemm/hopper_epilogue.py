# SPDX-License-Identifier: Apache-2.0
"""Epilogues of the Hopper GEMM kernel: norm and RoPE where there are any, rounding, stores.

What is stored is rounded once, goes through shared memory by ``stmatrix`` and leaves as 16 x 64
boxes, one warp each, which TMA clips at the edges.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from cudnn_blocks.stages.device.tma import TmaOperand
from cudnn_blocks.stages.gemm.hopper_codes import CodeRole
from cudnn_blocks.stages.gemm.hopper_config import (
    STORE_BUFFERS,
    STORE_COLUMNS,
    WARP_ROWS,
    Fragment,
    GemmKernelConfig,
)
from cudnn_blocks.stages.gemm.hopper_norm_rope import NormRopeRole
from cudnn_blocks.stages.gemm.hopper_schedule import Thread, TileOrigin

VEC = 8  # elements of a 16-byte row of an 8 x 8 matrix


@dataclass(frozen=True)
class EpilogueRole:
    """Everything after the last wgmma of a tile, for one consumer thread."""

    config: GemmKernelConfig
    thread: Thread
    output_tma: TmaOperand
    """(N, M), boxes of 64 x 16."""
    sY: cute.Tensor
    """(COLUMN, ROW, (BUFFER, WARP)): boxes on their way out."""
    norm_rope: NormRopeRole | None
    alpha: Float32 | None
    """Factor of the sums, where there is one."""
    codes: CodeRole | None
    """Stores of Q, K and V as codes."""

    @cute.jit
    def prepare(self, fragment: cutlass.Constexpr[Fragment], origin: TileOrigin):
        """Loads what the epilogue wants to have before the mainloop; None for nothing."""
        rTables = None
        if const_expr(self.config.prefetches_tables):
            rTables = self.norm_rope.prefetch_tables(fragment, origin)
        return rTables

    @cute.jit
    def finish(
        self,
        tCrC: cute.Tensor,
        fragment: cutlass.Constexpr[Fragment],
        origin: TileOrigin,
        rTables: cute.Tensor | None,
        exchanges: Int32,
    ) -> Int32:
        """Epilogue and stores of one tile.

        ``exchanges`` counts the warpgroup's tiles whose sums the other CTA had to show; returned is
        the count with this tile.
        """
        if const_expr(self.alpha is not None):
            tCrC.store(tCrC.load() * self.alpha)
        role, rHeads, rScale = self.norm_rope, None, None
        if const_expr(role is not None):
            rHeads = role.heads_of(tCrC, fragment)
            if const_expr(self.config.norm_rope.has_norm):
                rScale = cute.make_rmem_tensor((2, *rHeads.shape[3:]), Float32)
                exchanges = role.find_scales(rScale, rHeads, fragment, origin, exchanges)
        for b in cutlass.range_constexpr(fragment.blocks):
            # Block by block: a store frees registers for the tables of the next block.
            if const_expr(role is not None):
                role.apply(rHeads, rScale, fragment, origin, rTables, b)
            self.store_block(tCrC, fragment, origin, b)
        return exchanges

    @cute.jit
    def store_block(
        self,
        tCrC: cute.Tensor,
        fragment: cutlass.Constexpr[Fragment],
        origin: TileOrigin,
        block: cutlass.Constexpr[int],
    ):
        """Rounds once, and sends 64 columns of a warp's 16 rows at a time."""
        groups = fragment.columns // STORE_COLUMNS
        layout = cute.make_layout(
            (2, 2, 2, STORE_COLUMNS // 16, groups, fragment.blocks),
            stride=(1, 2, 4, 8, STORE_COLUMNS // 2, fragment.columns // 2),
        )
        rAcc = cute.make_tensor(tCrC.iterator, layout)  # (E, R, J, PAIR, GROUP, BLOCK)
        row = origin.row + self.thread.block_row(fragment, block)
        for g in cutlass.range_constexpr(groups):
            buffer = (block * groups + g) % STORE_BUFFERS
            # An odd number of boxes ends in the buffer that the next tile begins with.
            follows = block + g > 0 or fragment.blocks * groups % STORE_BUFFERS == 0
            pending = STORE_BUFFERS - 1 if const_expr(follows) else 0
            rGroup = rAcc[None, None, None, None, g, block]
            column = self.thread.first_column(fragment, origin) + g * STORE_COLUMNS
            if const_expr(self.codes is None):
                self.store_box(rGroup, column, row, buffer, pending)
            else:
                facts = self.config.norm_rope
                if self.codes.bands.is_gate(facts, column):
                    # Boxes that are left out would upset the count of those before this one.
                    gate_column = column - facts.h_q * facts.d_head
                    self.store_box(rGroup, gate_column, row, buffer, 0)
                else:
                    self.codes.store(rGroup, column, row)

    @cute.jit
    def store_box(
        self,
        rGroup: cute.Tensor,
        column: Int32,
        row: Int32,
        buffer: cutlass.Constexpr[int],
        pending: cutlass.Constexpr[int],
    ):
        """64 columns ``(E, R, J, PAIR)``, once all boxes but the last ``pending`` have left."""
        dtype = self.sY.element_type
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(num_matrices=4), dtype)
        cute.arch.cp_async_bulk_wait_group(pending, read=True)
        cute.arch.sync_warp()
        for pair in cutlass.range_constexpr(STORE_COLUMNS // 16):
            rY = round_matrices(rGroup[None, None, None, pair], dtype)
            cute.copy(atom, rY, self.matrix_row(buffer, pair))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        self.send(buffer, column, row)

    def matrix_row(self, buffer: int, pair: int) -> cute.Tensor:
        """The row of an 8 x 8 matrix that this lane addresses for ``stmatrix``.

        Matrices: rows 0-7 and 8-15 of columns 16 ``pair`` on, then of the next 8 columns. The
        swizzle exchanges the 16-byte chunks of a row by the row's place among 8.
        """
        lane = self.thread.lane
        chunk = (lane // 16 ^ lane % 8) ^ 2 * pair
        box = (self.thread.warp * STORE_BUFFERS + buffer) * (WARP_ROWS * STORE_COLUMNS)
        offset = cute.assume(box + lane % 16 * STORE_COLUMNS + chunk * VEC, divby=VEC)
        plain = cute.recast_ptr(self.sY.iterator, dtype=self.sY.element_type)
        return cute.make_tensor(plain + offset, cute.make_layout(VEC))

    @cute.jit
    def send(self, buffer: cutlass.Constexpr[int], column: Int32, row: Int32):
        """One box; TMA drops what lies past the last row and column."""
        tma = self.output_tma
        box = (STORE_COLUMNS, WARP_ROWS)
        gY = cute.local_tile(cute.domain_offset((column, row), tma.tensor), box, (0, 0))
        sBox = self.sY[None, None, (buffer, self.thread.warp)]
        sBox, gY = (cute.group_modes(box, 0, 2) for box in (sBox, gY))
        tYsY, tYgY = cpasync.tma_partition(tma.atom, 0, cute.make_layout(1), sBox, gY)
        cute.copy(tma.atom, tYsY, tYgY)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def round_matrices(rAcc: cute.Tensor, dtype: cutlass.Constexpr[type]) -> cute.Tensor:
    """The accumulators of four 8 x 8 matrices, rounded; ``(E, R, J)`` becomes flat."""
    rFlat = cute.make_rmem_tensor(VEC, Float32)
    for i in cutlass.range_constexpr(VEC):
        rFlat[i] = rAcc[i]
    rY = cute.make_rmem_tensor(VEC, dtype)
    rY.store(rFlat.load().to(dtype))
    return rY
