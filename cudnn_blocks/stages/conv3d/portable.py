# SPDX-License-Identifier: Apache-2.0
"""Valid 3x3x3 convolution of NTHWC activations with its post-operations (sm_80 and newer).

    conv  = B(sum over t, r, s, c of input * weight)      FP32 accumulation; B: rounding to BF16
    value = B(B(conv + bias) + B(residual + residual_bias))
    den   = max(sqrt(sum over c of value**2), 1e-12)
    x     = B(B(B(value / den) * sqrt(Co)) * gamma)
    y     = B(x / (1 + exp(-x)))

``raw`` stores conv, ``bias_residual_pad`` value, ``norm`` and ``norm_pad`` value and y.

Implicit GEMM: M = pixels of one frame, N = output channels, K = (plane t, chunk of 32 input
               channels, tap r s, channel). mma.sync m16n8k16.
Grid:          x only, one CTA per tile of pixels and tile of channels, channels fastest, then W, H,
               T, N. The norm needs a pixel's full row, so its tile of channels is Co <= 320.
Warps:         4 or 8, each 64 pixels x at most 80 channels: 4 m16 blocks of 8 w x 2 h.
Pipeline:      cp.async groups, one a tap. A has two stages, each the halo of one chunk, which
               serves the 9 taps as shifted rows and is copied during the taps of the chunk before;
               B has three, each one tap, copied two taps ahead. One barrier a tap.
Shared memory: rows of 64 bytes, whose 16-byte columns are XOR-ed with bits 1 and 2 of the row's
               number: any 8 consecutive rows are free of conflicts. The epilogue's tile of BF16
               pixels takes the stages' place. Beside them the pixel of every row of the halo, and
               the channel vectors. At most 91 KiB, so that every target has room.
Channels:      rows of B are permuted within 16, so that a thread holds 4 consecutive channels.
               Channels past Ci and Co are filled with zeros.
Epilogue:      a quad of threads owns a pixel, a thread every fourth vector of 8 channels.
Zero frames:   K starts behind planes that are known to be zero. The sum of the others starts from
               the same zero, so the bits are those of the full sum.
Borders:       the warps of the whole grid share the border rows, columns and planes; the interior
               of history is never touched.
Requires:      contiguous tensors, 16-byte aligned; Ci, Co multiples of 8; T, H, W >= 3; H * W,
               8 * N * T * H and the number of tiles below 2**31.
Source:        written for this project; behaviour after the conv3d family of cudnn-frontend.
"""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.memory import SmemAllocator

from cudnn_blocks.stages.conv3d.epilogues import NORM, NORM_PAD, RAW
from cudnn_blocks.stages.conv3d.portable_config import (
    CHUNK,
    GROUP,
    MMA_K,
    NUM_A_STAGES,
    NUM_B_STAGES,
    QUAD,
    TAPS_PER_PLANE,
    VEC,
    WARP_BLOCKS,
    WARP_THREADS,
    Conv3dKernelConfig,
)
from cudnn_blocks.stages.device.bf16 import widen
from cudnn_blocks.stages.device.cp_async import cp_async_16, cp_async_16_or_zero
from cudnn_blocks.stages.device.masked_store import store_16_if
from cudnn_blocks.stages.device.rounding import add_rounded, divide, row_divisor
from cudnn_blocks.stages.device.silu import silu_of_bf16

NUM_PLANES = 3
BIAS, GAMMA, RESIDUAL_BIAS = range(3)  # columns of sVec
BORDER_PARTS = 8  # pieces of a border row, each for another warp


class Tile(NamedTuple):
    """Where a CTA works: ``plane = n * T + t`` is the first of its three input planes."""

    plane: Int32
    h0: Int32
    w0: Int32
    c0: Int32
    num_planes: Int32
    """T of the input."""
    height: Int32
    """Rows of an output frame."""
    width: Int32

    @property
    def n(self) -> Int32:
        return self.plane // self.num_planes

    @property
    def t(self) -> Int32:
        return self.plane % self.num_planes

    @property
    def frame(self) -> Int32:
        """Index of the output frame over N and T."""
        return self.plane - 2 * self.n


class Conv3dKernel:
    """One launch of the convolution and its post-operations; see the module docstring."""

    def __init__(self, config: Conv3dKernelConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        input: cute.Tensor,
        packed_weight: cute.Tensor,
        bias: cute.Tensor | None,
        gamma: cute.Tensor | None,
        residual: cute.Tensor | None,
        residual_bias: cute.Tensor | None,
        output: cute.Tensor,
        residual_output: cute.Tensor | None,
        cache_output: cute.Tensor | None,
        stream,
    ):
        cfg = self.config
        tiles_w = (input.shape[3] - 3) // cfg.tile_w + 1
        tiles_h = (input.shape[2] - 3) // cfg.tile_h + 1
        num_frames = input.shape[0] * (input.shape[1] - 2)
        vectors = (bias, gamma, residual_bias)
        activations = (residual, output, residual_output, cache_output)
        self.kernel(input, packed_weight, vectors, activations, tiles_w, tiles_h).launch(
            grid=(num_frames * tiles_h * tiles_w * cfg.num_channel_tiles, 1, 1),
            block=(cfg.threads, 1, 1),
            min_blocks_per_mp=1,  # or ptxas spills to make room for a third CTA
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mW: cute.Tensor,
        vectors: tuple,
        activations: tuple,
        tiles_w: Int32,
        tiles_h: Int32,
    ):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        column = bidx // cfg.num_channel_tiles
        frame = column // tiles_w // tiles_h
        tile = Tile(
            plane=frame + frame // (mX.shape[1] - 2) * 2,
            h0=column // tiles_w % tiles_h * cfg.tile_h,
            w0=column % tiles_w * cfg.tile_w,
            c0=bidx % cfg.num_channel_tiles * cfg.tile_channels,
            num_planes=mX.shape[1],
            height=mX.shape[2] - 2,
            width=mX.shape[3] - 2,
        )

        smem = SmemAllocator()
        sTile = smem.allocate_tensor(
            BFloat16, cute.make_layout(cfg.tile_elements), byte_alignment=128
        )
        sA = cute.make_tensor(sTile.iterator, cute.make_layout(NUM_A_STAGES * cfg.a_stage))
        sB = cute.make_tensor(
            sTile.iterator + NUM_A_STAGES * cfg.a_stage,
            cute.make_layout(NUM_B_STAGES * cfg.b_stage),
        )
        sHalo = smem.allocate_tensor(Int32, cute.make_layout(cfg.halo_entries), byte_alignment=16)
        self.locate_halo(sHalo, mX, tile, tidx)
        sVec = None
        if const_expr(cfg.num_vectors > 0):
            layout = cute.make_layout((cfg.tile_channels, cfg.num_vectors))
            sVec = smem.allocate_tensor(BFloat16, layout, byte_alignment=16)
            self.load_vectors(vectors, sVec, tile.c0, tidx)
        if const_expr(cfg.is_padded):
            self.zero_borders(activations[1], tidx, bidx)

        cute.arch.sync_threads()
        tCrC = self.accumulate(mX, mW, sA, sB, sHalo, tile, tidx)
        cute.arch.sync_threads()
        self.stage_conv(tCrC, sTile)
        cute.arch.sync_threads()
        self.finish_pixels(sTile, sVec, activations, tile, tidx)

    # Accumulation.

    @cute.jit
    def accumulate(self, mX, mW, sA, sB, sHalo, tile, tidx) -> cute.Tensor:
        """FP32 accumulators of this warp: ((channel of a pair, row), block, n8)."""
        cfg = self.config
        first_chunk = Int32(0)
        if const_expr(cfg.zero_leading_frames > 0):
            first_chunk = cutlass.max(cfg.zero_leading_frames - tile.t, 0) * cfg.num_chunks
        num_chunks = NUM_PLANES * cfg.num_chunks

        for i in cutlass.range_constexpr(cfg.a_copies):
            self.copy_a(mX, sA, sHalo, i, first_chunk, tile, tidx)
        column = first_chunk // cfg.num_chunks * (TAPS_PER_PLANE * cfg.tap_pitch)
        for tap in cutlass.range_constexpr(NUM_B_STAGES - 1):
            self.copy_b(mW, sB, tap, column, tile.c0, tidx)
            cute.arch.cp_async_commit_group()
            column += cfg.tap_pitch

        mma_atom = cute.make_mma_atom(warp.MmaF16BF16Op(BFloat16, Float32, (16, 8, MMA_K)))
        layout = cute.make_layout(((2, 2), WARP_BLOCKS, cfg.warp_channels // 8))
        tCrC = cute.make_rmem_tensor(layout, Float32)
        tCrC.fill(0.0)
        for chunk in cutlass.range(first_chunk, num_chunks, unroll=1):
            has_next = chunk + 1 < num_chunks
            for r in cutlass.range(3, unroll=cfg.unrolled_rows):
                for s in cutlass.range_constexpr(3):
                    cute.arch.cp_async_wait_group(NUM_B_STAGES - 2)
                    cute.arch.sync_threads()
                    for k in cutlass.range_constexpr(cfg.chunk_vecs * VEC // MMA_K):
                        tCrA, tCrB = self.load_fragments(sA, sB, chunk % NUM_A_STAGES, r, s, k)
                        if const_expr(k == 0):
                            tap = r * 3 + s
                            ahead = tap + NUM_B_STAGES - 1
                            if has_next | (ahead < TAPS_PER_PLANE):
                                stage = (s + NUM_B_STAGES - 1) % NUM_B_STAGES
                                self.copy_b(mW, sB, stage, column, tile.c0, tidx)
                            if has_next & (tap < cfg.a_copies):
                                self.copy_a(mX, sA, sHalo, tap, chunk + 1, tile, tidx)
                            cute.arch.cp_async_commit_group()
                            column += cfg.tap_pitch
                            if ahead == TAPS_PER_PLANE - 1:
                                column += self.next_chunk_columns(chunk)
                        cute.gemm(mma_atom, tCrC, tCrA, tCrB, tCrC)
        return tCrC

    @cute.jit
    def load_fragments(
        self, sA, sB, stage_a, r, s: cutlass.Constexpr[int], k: cutlass.Constexpr[int]
    ):
        """Operands of the k-th k16 step of tap (r, s); a lane gives the address of one row."""
        cfg = self.config
        ldmatrix_atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(num_matrices=4), BFloat16)
        lane = cute.arch.lane_idx()
        warp_m, warp_n = self.warp_position()
        tCrA = cute.make_rmem_tensor(cute.make_layout(((2, 2, 2), WARP_BLOCKS)), BFloat16)
        tCrB = cute.make_rmem_tensor(cute.make_layout(((2, 2), cfg.warp_channels // 8)), BFloat16)
        rA = cute.make_tensor(tCrA.iterator, cute.make_layout((VEC, WARP_BLOCKS)))
        rB = cute.make_tensor(tCrB.iterator, cute.make_layout((VEC, cfg.num_groups)))

        h, w = self.block_origin(warp_m, 0)
        row = (h + lane // 8 % 2 + r) * cfg.halo_pitch + w + lane % 8 + s
        offset = stage_a * cfg.a_stage + swizzled(row, 2 * k + lane // 16)
        for i in cutlass.range_constexpr(WARP_BLOCKS):
            rows = i // cfg.blocks_w * 2 * cfg.halo_pitch + i % cfg.blocks_w * 8
            cute.copy(ldmatrix_atom, vector_view(sA, offset + rows * CHUNK, VEC), rA[None, i])

        row = warp_n * cfg.warp_channels + lane // 16 * 8 + lane % 8
        offset = s * cfg.b_stage + swizzled(row, 2 * k + lane // 8 % 2)
        for g in cutlass.range_constexpr(cfg.num_groups):
            cute.copy(ldmatrix_atom, vector_view(sB, offset + g * GROUP * CHUNK, VEC), rB[None, g])
        return tCrA, tCrB

    # Global to shared memory.

    @cute.jit
    def locate_halo(self, sHalo, mX, tile, tidx):
        """Pixel within its plane of every row of an A stage, -1 for rows that no tap reads.

        Pixels past the plane repeat its last row or column: no output that is stored needs them.
        """
        cfg = self.config
        for i in cutlass.range_constexpr(-(-cfg.halo_entries // cfg.threads)):
            row = tidx + i * cfg.threads
            r, s = row // cfg.halo_pitch, row % cfg.halo_pitch
            pixel = cutlass.min(tile.h0 + r, mX.shape[2] - 1) * mX.shape[3]
            pixel += cutlass.min(tile.w0 + s, mX.shape[3] - 1)
            if (row >= cfg.halo_rows) | (s >= cfg.tile_w + 2):
                pixel = Int32(-1)
            if row < cfg.halo_entries:
                sHalo[row] = pixel

    @cute.jit
    def copy_a(self, mX, sA, sHalo, i, chunk, tile, tidx):
        """Starts this thread's i-th copy of a chunk's halo."""
        cfg = self.config
        row, vec = tidx // cfg.chunk_vecs, tidx % cfg.chunk_vecs
        pixel = sHalo[row + i * cfg.copy_rows]
        if pixel >= 0:
            plane = Int64(tile.plane + chunk // cfg.num_chunks) * (mX.shape[2] * mX.shape[3])
            c = chunk % cfg.num_chunks * CHUNK + vec * VEC
            src = vector_view(mX, (plane + pixel) * cfg.in_channels + c, VEC).iterator
            start = chunk % NUM_A_STAGES * cfg.a_stage + i * (cfg.copy_rows * CHUNK)
            dst = vector_view(sA, start + swizzled(row, vec), VEC).iterator
            if const_expr(cfg.in_channels % (cfg.chunk_vecs * VEC) != 0):
                cp_async_16_or_zero(dst, src, c < cfg.in_channels)
            else:
                cp_async_16(dst, src)

    @cute.jit
    def copy_b(self, mW, sB, stage: cutlass.Constexpr[int], column, c0, tidx):
        """Starts this thread's copies of the tap whose weights begin at ``column``.

        Row ``8 j + 2 q + e`` of a group of 16 is channel ``4 q + 2 j + e``: column ``2 q + e`` of
        the n8 tile j belongs to lane q of a quad.
        """
        cfg = self.config
        pitch = math.prod(cfg.weight_shape[1:])
        row, vec = tidx // cfg.chunk_vecs, tidx % cfg.chunk_vecs
        channel = c0 + row // GROUP * GROUP + row % 8 // 2 * 4 + row // 8 % 2 * 2 + row % 2
        first = Int64(channel) * pitch + (column + vec * VEC)
        for i in cutlass.range_constexpr(cfg.b_copies):
            rows = i * cfg.copy_rows
            start = stage * cfg.b_stage + rows * CHUNK
            src = vector_view(mW, first + rows * pitch, VEC).iterator
            dst = vector_view(sB, start + swizzled(row, vec), VEC).iterator
            is_copied = Boolean(True)
            if const_expr(rows + cfg.copy_rows > cfg.tile_channels):
                is_copied = row + rows < cfg.tile_channels
            if is_copied:
                if const_expr(cfg.has_channel_tail):
                    cp_async_16_or_zero(dst, src, channel + rows < cfg.out_channels)
                else:
                    cp_async_16(dst, src)

    @cute.jit
    def next_chunk_columns(self, chunk) -> Int32:
        """Columns from behind a chunk's last tap to the first tap of the next chunk."""
        cfg = self.config
        columns = Int32(CHUNK - TAPS_PER_PLANE * cfg.tap_pitch)
        if (chunk + 1) % cfg.num_chunks == 0:
            columns = Int32((1 - cfg.num_chunks) * CHUNK)
        return columns

    @cute.jit
    def load_vectors(self, vectors, sVec, c0, tidx):
        """Copies the tile's part of bias, gamma and residual_bias; a channel past Co is zero."""
        cfg = self.config
        rZero = cute.make_rmem_tensor(VEC, BFloat16)
        rZero.fill(0.0)
        c = tidx * VEC
        if c < cfg.tile_channels:
            for i in cutlass.range_constexpr(cfg.num_vectors):
                if const_expr(vectors[i] is not None):
                    dst = vector_view(sVec, i * cfg.tile_channels + c, VEC)
                    if c0 + c < cfg.out_channels:
                        cute.autovec_copy(vector_view(vectors[i], c0 + c, VEC), dst)
                    else:
                        cute.autovec_copy(rZero, dst)

    @cute.jit
    def zero_borders(self, mO, tidx, bidx):
        """Zeroes this warp's pieces of the border, and of the planes without history."""
        cfg = self.config
        lane = cute.arch.lane_idx()
        grid, _, _ = cute.arch.grid_dim()
        num_planes, height = Uint32(mO.shape[1]), Uint32(mO.shape[2])
        pixel_vecs = Int32(cfg.out_channels // VEC)
        row_vecs = mO.shape[3] * pixel_vecs
        num_pieces = Uint32(mO.shape[0]) * num_planes * height * BORDER_PARTS
        rZero = cute.make_rmem_tensor(VEC, BFloat16)
        rZero.fill(0.0)
        piece = Uint32(bidx * cfg.num_warps + tidx // WARP_THREADS)
        while piece < num_pieces:
            part, row = Int32(piece % BORDER_PARTS), piece // BORDER_PARTS
            h = row % height
            is_whole = h == height - 1
            if const_expr(cfg.epilogue == NORM_PAD):
                is_whole |= h == 0
                is_whole |= row // height % num_planes < 2 - cfg.history_frames
            start = Int64(row) * row_vecs
            if is_whole:
                step = BORDER_PARTS * WARP_THREADS
                for v in cutlass.range(part * WARP_THREADS + lane, row_vecs, step, unroll=1):
                    cute.autovec_copy(rZero, vector_view(mO, (start + v) * VEC, VEC))
            elif part == 0:
                last = start + row_vecs - pixel_vecs
                for v in cutlass.range(lane, pixel_vecs, WARP_THREADS, unroll=1):
                    cute.autovec_copy(rZero, vector_view(mO, (last + v) * VEC, VEC))
                    if const_expr(cfg.epilogue == NORM_PAD):
                        cute.autovec_copy(rZero, vector_view(mO, (start + v) * VEC, VEC))
            piece += Uint32(grid * cfg.num_warps)

    # Epilogue.

    @cute.jit
    def stage_conv(self, tCrC, sC):
        """Writes B(conv) to the epilogue's tile, pixels row-major in (h, w)."""
        cfg = self.config
        lane = cute.arch.lane_idx()
        warp_m, warp_n = self.warp_position()
        for i in cutlass.range_constexpr(WARP_BLOCKS):
            for r in cutlass.range_constexpr(2):
                h, w = self.block_origin(warp_m, i)
                pixel = (h + r) * cfg.tile_w + w + lane // QUAD
                for g in cutlass.range_constexpr(cfg.num_groups):
                    c = warp_n * cfg.warp_channels + g * GROUP + lane % QUAD * 4
                    rC = cute.make_rmem_tensor(4, BFloat16)
                    quad = cute.local_tile(tCrC[(None, r), i, None], (2, 2), (0, g))
                    rC.store(quad.load().to(BFloat16))
                    cute.autovec_copy(rC, vector_view(sC, pixel * cfg.pixel_pitch + c, 4))

    @cute.jit
    def finish_pixels(self, sC, sVec, activations, tile, tidx):
        """Post-operations and stores; all threads of a quad take part, inside the frame or not."""
        cfg = self.config
        mRes, mO, mResO, mCache = activations
        mValue = mResO if const_expr(cfg.is_norm) else mO
        for first in cutlass.range(0, cfg.tile_pixels, cfg.threads // QUAD, unroll=1):
            pixel = first + tidx // QUAD
            h, w = tile.h0 + pixel // cfg.tile_w, tile.w0 + pixel % cfg.tile_w
            is_inside = (h < tile.height) & (w < tile.width)
            rSkip = self.load_pixel(mRes, tile, h, w, is_inside)
            rV = self.lane_fragment()
            total = Float32(0.0)
            for j in cutlass.range_constexpr(cute.size(rV, mode=[1])):
                c = lane_channel(j)
                value = vector_view(sC, pixel * cfg.pixel_pitch + c, VEC).load()
                if const_expr(cfg.epilogue != RAW):
                    value = add_rounded(value, self.channel_vector(sVec, BIAS, c))
                if const_expr(cfg.has_residual):
                    skip = rSkip[None, j].load()
                    if const_expr(cfg.has_residual_bias):
                        skip = add_rounded(skip, self.channel_vector(sVec, RESIDUAL_BIAS, c))
                    value = add_rounded(value, skip)
                rV[None, j].store(value)
                if const_expr(cfg.is_norm):
                    wide = widen(value)
                    for e in cutlass.range_constexpr(VEC):
                        total = cute.math.fma(wide[e], wide[e], total)
            if const_expr(mValue is not None):
                self.store_pixel(rV, mValue, tile, tile.frame, h, w, is_inside)
            if const_expr(cfg.is_norm):
                self.normalise(rV, sVec, total)
                if const_expr(cfg.epilogue == NORM):
                    self.store_pixel(rV, mO, tile, tile.frame, h, w, is_inside)
                else:
                    self.store_pixel(rV, mO, tile, tile.plane + 2, h + 1, w + 1, is_inside)
                    kept = tile.t + 2 - tile.num_planes + mCache.shape[1]
                    frame = tile.n * mCache.shape[1] + kept
                    self.store_pixel(rV, mCache, tile, frame, h, w, is_inside & (kept >= 0))

    @cute.jit
    def normalise(self, rV, sVec, total: Float32):
        """Norm, scale, gamma and SiLU in place; ``total`` is this lane's sum of squares."""
        cfg = self.config
        for offset in cutlass.range_constexpr(1, QUAD // 2 + 1):
            total += cute.arch.shuffle_sync_bfly(total, offset=offset)
        den, inverse = row_divisor(total)
        for j in cutlass.range_constexpr(cute.size(rV, mode=[1])):
            gamma = self.channel_vector(sVec, GAMMA, lane_channel(j))
            x = divide(widen(rV[None, j].load()), den, inverse).to(BFloat16)
            x = (widen(x) * math.sqrt(cfg.out_channels)).to(BFloat16)
            x = (widen(x) * widen(gamma)).to(BFloat16)
            rV[None, j].store(silu_of_bf16(widen(x)).to(BFloat16))

    @cute.jit
    def load_pixel(self, mRes, tile, h, w, is_inside: Boolean) -> cute.Tensor:
        """This lane's channels of the residual; zero where there are none."""
        rSkip = self.lane_fragment()
        if const_expr(self.config.has_residual):
            rSkip.fill(0.0)
            base = self.pixel_offset(mRes, tile, tile.frame, h, w)
            for j in cutlass.range_constexpr(cute.size(rSkip, mode=[1])):
                c = lane_channel(j)
                if is_inside & self.has_channel(tile, c):
                    cute.autovec_copy(vector_view(mRes, base + c, VEC), rSkip[None, j])
        return rSkip

    @cute.jit
    def store_pixel(self, rV, mT, tile, frame, h, w, is_stored: Boolean):
        """Stores this lane's channels of one pixel of ``mT``, whose N and T count as one."""
        base = self.pixel_offset(mT, tile, frame, h, w)
        for j in cutlass.range_constexpr(cute.size(rV, mode=[1])):
            c = lane_channel(j)
            dst = vector_view(mT, base + c, VEC).iterator
            store_16_if(is_stored & self.has_channel(tile, c), rV[None, j].load(), dst)

    # Positions.

    def warp_position(self):
        """Place along the pixels and along the channels; ``warps_m`` is a power of 2."""
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warps_m = self.config.warps_m
        return warp_idx & (warps_m - 1), warp_idx >> (warps_m.bit_length() - 1)

    def block_origin(self, warp_m, i: int):
        """First row and column, within the tile, of the i-th block of a warp."""
        blocks_w = self.config.blocks_w
        return 2 * (warp_m * (WARP_BLOCKS // blocks_w) + i // blocks_w), i % blocks_w * 8

    def lane_fragment(self) -> cute.Tensor:
        """(VEC, J): a lane's channels of a pixel in the epilogue."""
        layout = cute.make_layout((VEC, self.config.lane_vecs))
        return cute.make_rmem_tensor(layout, BFloat16)

    def has_channel(self, tile: Tile, c) -> Boolean:
        """The tile's channel c exists."""
        if not self.config.has_channel_tail:
            return Boolean(True)
        return tile.c0 + c < self.config.out_channels

    def channel_vector(self, sVec, vector: int, c) -> cute.TensorSSA:
        return vector_view(sVec, vector * self.config.tile_channels + c, VEC).load()

    def pixel_offset(self, mT, tile: Tile, frame, h, w) -> Int64:
        """Offset of the tile's first channel of a pixel."""
        pixel = Int64(frame) * (mT.shape[2] * mT.shape[3]) + (h * mT.shape[3] + w)
        return pixel * self.config.out_channels + tile.c0


def lane_channel(j: int):
    """First channel, within the tile, of this lane's j-th vector in the epilogue."""
    return (cute.arch.lane_idx() % QUAD + QUAD * j) * VEC


def swizzled(row, vec):
    """Element offset of 16-byte column ``vec`` of a 64-byte row."""
    return row * CHUNK + (vec ^ (row >> 1 & 3)) * VEC


def vector_view(tensor: cute.Tensor, offset, size: int) -> cute.Tensor:
    """``size`` consecutive elements from a multiple of ``size`` on."""
    iterator = tensor.iterator + cute.assume(offset, divby=size)
    return cute.make_tensor(iterator, cute.make_layout(size))


def fake_operands(config: Conv3dKernelConfig) -> tuple:
    """Fake tensors in ``__call__`` order, without the stream; N, T, H and W are dynamic."""
    channels = config.out_channels

    def contiguous(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(BFloat16, shape, stride_order=order, assumed_align=16)

    def extents(count):
        return [cute.sym_int() for _ in range(count)]

    n, height, width = extents(3)
    valid = (n, *extents(3), channels)
    has_vectors = config.epilogue != RAW
    return (
        contiguous(n, *extents(1), height, width, config.in_channels),
        contiguous(*config.weight_shape),
        contiguous(channels) if has_vectors else None,
        contiguous(channels) if config.is_norm else None,
        contiguous(*valid) if config.has_residual else None,
        contiguous(channels) if config.has_residual_bias else None,
        contiguous(n, *extents(3), channels) if config.is_padded else contiguous(*valid),
        contiguous(*valid) if config.is_norm and config.has_residual else None,
        contiguous(n, *extents(1), *valid[2:]) if config.epilogue == NORM_PAD else None,
    )
