# SPDX-License-Identifier: Apache-2.0
"""Codes of the bands Q, K and V: how the Hopper GEMM kernel stores them.

    code = sat_e4m3(value * scale of the band)

A lane of a quad holds two columns of every 8. Four groups of 8 are exchanged within the quad, so
that each lane has 8 neighbouring codes, and a quad stores 32 bytes of a row.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cudnn_blocks.stages.device.codes import encode_e4m3x4
from cudnn_blocks.stages.device.masked_store import store_words_if
from cudnn_blocks.stages.gemm.hopper_config import STORE_COLUMNS, GemmKernelConfig
from cudnn_blocks.stages.gemm.hopper_schedule import Thread
from cudnn_blocks.stages.gemm.portable_operands import CodedBands

LANE_CODES = 8  # neighbouring codes of a lane
QUAD_COLUMNS = 32
HALF_MASK = 0xFFFF


@dataclass(frozen=True)
class CodeRole:
    """Stores of codes, for one consumer thread."""

    config: GemmKernelConfig
    thread: Thread
    num_rows: Int32
    bands: CodedBands

    @cute.jit
    def store(self, rAcc: cute.Tensor, column: Int32, first_row: Int32) -> None:
        """64 columns of a warp's 16 rows, ``(E, R, J, PAIR)``."""
        band = self.bands.band(self.config.norm_rope, column)
        quad_lane = self.thread.quad_lane
        for r in cutlass.range_constexpr(2):
            row = first_row + r * 8 + self.thread.lane // 4
            is_stored = (row < self.num_rows) & band.is_inside
            for i in cutlass.range_constexpr(STORE_COLUMNS // QUAD_COLUMNS):
                rX = cute.make_rmem_tensor((4, 2), Float32)
                for c in cutlass.range_constexpr(4):
                    group = 4 * i + c
                    for e in cutlass.range_constexpr(2):
                        rX[2 * c + e] = rAcc[e, r, group % 2, group // 2] * band.scale
                first, second = (encode_e4m3x4(rX[None, half], True) for half in range(2))
                first, second = transposed_in_quad(first, second, quad_lane)
                offset = Int64(row) * band.pitch + band.column
                offset += i * QUAD_COLUMNS + quad_lane * LANE_CODES
                rCodes = cute.make_rmem_tensor(2, Uint32)
                rCodes[0], rCodes[1] = first, second
                store_words_if(is_stored, rCodes, band.pointer(offset))


@cute.jit
def transposed_in_quad(first: Uint32, second: Uint32, quad_lane: Int32) -> tuple[Uint32, Uint32]:
    """Halves 0 to 3 of two words in each lane become half ``quad_lane`` of lanes 0 to 3."""
    is_upper, is_odd = quad_lane >= 2, quad_lane % 2 == 1
    kept, sent = (second, first) if is_upper else (first, second)
    got = cute.arch.shuffle_sync_bfly(sent, 2)
    low_lane, high_lane = (got, kept) if is_upper else (kept, got)
    lows = low_lane & HALF_MASK | high_lane << 16
    highs = low_lane >> 16 | high_lane & Uint32(0xFFFF0000)
    kept, sent = (highs, lows) if is_odd else (lows, highs)
    got = cute.arch.shuffle_sync_bfly(sent, 1)
    even_lane, odd_lane = (got, kept) if is_odd else (kept, got)
    return (
        even_lane & HALF_MASK | odd_lane << 16,
        even_lane >> 16 | odd_lane & Uint32(0xFFFF0000),
    )
