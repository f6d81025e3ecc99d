# SPDX-License-Identifier: Apache-2.0
"""Epilogues of the Hopper Conv3D kernel, on accumulators in registers.

Quad lane ``q`` of an accumulator row owns channels ``32 g + 8 q ... 32 g + 8 q + 7`` of every group
``g``, so that loads and stores are 16 bytes and a row is reduced in the thread and by two shuffles.

A fused epilogue makes two passes. The first forms ``value``, leaves it widened in the accumulators
and sums its squares; the second normalises, scales, activates and stores.

Residual arrives behind the taps of a tile, in weight stages of 64 pixels. Each warpgroup takes its
own stage, writes ``value`` over it and sends it off by TMA, which clips at the edges.

Additions and products of BF16 vectors round once from the exact result, as B(float op float) does.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, const_expr
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from cudnn_blocks.stages.conv3d.hopper_config import (
    BLOCK_PIXELS,
    BLOCK_SIDE,
    CONSUMER_WARPGROUPS,
    WARP_THREADS,
    WARPGROUP_THREADS,
    Conv3dKernelConfig,
)
from cudnn_blocks.stages.conv3d.hopper_operands import pixel_box
from cudnn_blocks.stages.conv3d.hopper_schedule import OutputTile, block_origin
from cudnn_blocks.stages.device.bf16 import widen
from cudnn_blocks.stages.device.masked_store import store_16_if
from cudnn_blocks.stages.device.rounding import divide, row_divisor
from cudnn_blocks.stages.device.silu import silu_of_bf16
from cudnn_blocks.stages.device.tma import TmaOperand, partition_box

VEC = 8  # channels of one 16-byte access
BIAS, GAMMA, RESIDUAL_BIAS = range(3)  # columns of sVec


@dataclass(frozen=True)
class Outputs:
    """Global outputs; value leaves by TMA."""

    mO: cute.Tensor
    """The output at its valid sites ``[N, T-2, H-2, W-2, Co]``: these extents mask the stores."""
    mO_padded: cute.Tensor | None
    """The whole of an output with zeros around."""
    mC: cute.Tensor | None
    """``[N, min(2, T-2+P), H-2, W-2, Co]``: the last frames once more."""


@dataclass(frozen=True)
class RowSums:
    """Row sums of squares exchanged in a cluster; tiles alternate between two slots."""

    sSum: cute.Tensor
    """(ROW, CTA, SLOT)"""
    barriers: cute.Pointer
    """(WARPGROUP, SLOT): the two warpgroups stay independent."""


@dataclass(frozen=True)
class Thread:
    """Place of a consumer thread in the accumulator."""

    tidx: Int32
    warpgroup: Int32

    @property
    def quad_lane(self) -> Int32:
        """Which 8 channels of every 32."""
        return self.tidx % 4

    @property
    def column(self) -> Int32:
        """W within an 8 x 8 block."""
        return self.tidx % WARP_THREADS // 4

    @property
    def warp(self) -> Int32:
        """Warp within the warpgroup; it holds two H rows of a block."""
        return self.tidx % WARPGROUP_THREADS // WARP_THREADS

    def block(self, m: int) -> Int32:
        """The warpgroup's m-th block of the tile."""
        return m * CONSUMER_WARPGROUPS + self.warpgroup

    def row(self, m: int, r: int) -> Int32:
        """Row of the CTA tile, for exchanges of row facts."""
        return self.block(m) * BLOCK_PIXELS + self.warp * 16 + r * BLOCK_SIDE + self.column


@dataclass(frozen=True)
class EpilogueRole:
    """Everything after the last wgmma of a tile, for one consumer thread."""

    config: Conv3dKernelConfig
    thread: Thread
    outputs: Outputs
    value_tma: TmaOperand | None
    sVec: cute.Tensor | None
    """(C, VECTOR): bias, gamma, residual_bias."""
    sV: cute.Tensor
    """(C, W, H, T, N, WARP, STAGE): residual in weight stages."""
    row_sums: RowSums | None

    def vectors(self, tCrC: cute.Tensor) -> cute.Tensor:
        """(VEC, G, R, M): the accumulators as runs of consecutive channels."""
        cfg = self.config
        layout = cute.make_layout(
            ((2, 4), cfg.groups, 2, cfg.blocks_per_warpgroup),
            stride=((1, 4), 16, 2, cfg.tile.n_tile // 2),
        )
        return cute.make_tensor(tCrC.iterator, layout)

    @cute.jit
    def store_raw(self, tCrC: cute.Tensor, tile: OutputTile):
        """``B(conv)``."""
        cfg = self.config
        rAcc = self.vectors(tCrC)
        for m in cutlass.range_constexpr(cfg.blocks_per_warpgroup):
            for r in cutlass.range_constexpr(2):
                gO, is_inside = self.output_row(self.pixel(tile, m, r))
                for g in cutlass.range_constexpr(cfg.groups):
                    conv = load_vector(rAcc[None, g, r, m]).to(BFloat16)
                    store_16_if(is_inside, conv, gO[None, g].iterator)

    @cute.jit
    def form_value(
        self,
        tCrC: cute.Tensor,
        rSumSq: cute.Tensor,
        pipeline: PipelineTmaAsync,
        stage: PipelineState,
        tile: OutputTile,
    ) -> PipelineState:
        """First pass: ``value`` of the tile; returns the state behind the residual's stages."""
        cfg = self.config
        rAcc = self.vectors(tCrC)
        for m in cutlass.range_constexpr(cfg.blocks_per_warpgroup):
            sV_block = None
            if const_expr(cfg.has_residual):
                stage, own = self.take_residual(pipeline, stage)
                sV_block = self.sV[None, None, None, None, None, self.thread.warp, own.index]
            self.form_block(rAcc, rSumSq, sV_block, tile, m)
            if const_expr(cfg.has_residual):
                self.send_value(sV_block, tile, m)
                pipeline.consumer_release(own)
        return stage

    @cute.jit
    def take_residual(
        self, pipeline: PipelineTmaAsync, stage: PipelineState
    ) -> tuple[PipelineState, PipelineState]:
        """The state behind one stage per warpgroup, and the state of this warpgroup's own.

        The other's stage is waited for before it is released: an arrival while a stage is being
        filled would be counted into the phase before.
        """
        index = stage.index
        for other in cutlass.range_constexpr(CONSUMER_WARPGROUPS):
            pipeline.consumer_wait(stage)
            index = stage.index if self.thread.warpgroup == other else index
            if self.thread.warpgroup != other:
                pipeline.consumer_release(stage)
            stage.advance()
        own = PipelineState(self.config.num_weight_stages, stage.count, index, stage.phase)
        return stage, own

    @cute.jit
    def form_block(
        self,
        rAcc: cute.Tensor,
        rSumSq: cute.Tensor,
        sV: cute.Tensor | None,
        tile: OutputTile,
        m: cutlass.Constexpr[int],
    ):
        """``B(B(B(conv) + bias) + B(residual + residual_bias))`` of one block, and its squares."""
        cfg = self.config
        for g in cutlass.range_constexpr(cfg.groups):
            bias = self.channel_vector(BIAS, tile, g).load()
            if const_expr(cfg.has_residual_bias):
                residual_bias = self.channel_vector(RESIDUAL_BIAS, tile, g).load()
            for r in cutlass.range_constexpr(2):
                value = load_vector(rAcc[None, g, r, m]).to(BFloat16) + bias
                if const_expr(cfg.has_residual):
                    sV_pixel = sV[None, self.thread.column, r, 0, 0]
                    sV_vec = cute.local_tile(sV_pixel, (VEC,), (4 * g + self.thread.quad_lane,))
                    skip = sV_vec.load()
                    if const_expr(cfg.has_residual_bias):
                        skip = skip + residual_bias
                    value = value + skip
                    sV_vec.store(value)
                if const_expr(cfg.is_norm):
                    # Kept widened: unpacking again in the second pass costs more, and registers.
                    wide = widen(value)
                    sum_sq = rSumSq[r, m]
                    for i in cutlass.range_constexpr(VEC):
                        sum_sq = cute.math.fma(wide[i], wide[i], sum_sq)
                    rSumSq[r, m] = sum_sq
                    store_vector(wide, rAcc[None, g, r, m])

    @cute.jit
    def send_value(self, sV: cute.Tensor, tile: OutputTile, m: cutlass.Constexpr[int]):
        """Sends this warp's 16 pixels of ``value``; returns when their stage may be refilled."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        c, w, h, t, n = block_origin(self.config, tile, self.thread.block(m))
        origin = (c, w, h + self.thread.warp * 2, t, n)
        tVsV, tVgV = partition_box(self.value_tma, pixel_box(self.config, 2), origin, sV)
        cute.copy(self.value_tma.atom, tVsV, tVgV)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def normalise(self, tCrC: cute.Tensor, rSumSq: cute.Tensor, iteration: Int32, tile: OutputTile):
        """Second pass: ``B(silu(B(B(B(value / den) * sqrt(Co)) * gamma)))``, stored."""
        cfg = self.config
        rAcc = self.vectors(tCrC)
        self.reduce_rows(rSumSq, iteration)
        scale = Float32(cfg.out_channels**0.5)
        for m in cutlass.range_constexpr(cfg.blocks_per_warpgroup):
            for r in cutlass.range_constexpr(2):
                cute.arch.sync_warp()  # ptxas would mix the rows, and spill
                den, inverse = row_divisor(rSumSq[r, m])
                pixel = self.pixel(tile, m, r)
                gO, is_inside = self.output_row(pixel)
                if const_expr(self.outputs.mC is not None):
                    gC, is_cached = self.cache_row(pixel, is_inside)
                for g in cutlass.range_constexpr(cfg.groups):
                    gamma = self.channel_vector(GAMMA, tile, g).load()
                    value = load_vector(rAcc[None, g, r, m])
                    normalised = divide(value, den, inverse).to(BFloat16)
                    affine = (widen(normalised) * scale).to(BFloat16) * gamma
                    activated = silu_of_bf16(widen(affine)).to(BFloat16)
                    store_16_if(is_inside, activated, gO[None, g].iterator)
                    if const_expr(self.outputs.mC is not None):
                        store_16_if(is_cached, activated, gC[None, g].iterator)

    @cute.jit
    def reduce_rows(self, rSumSq: cute.Tensor, iteration: Int32):
        """Sums each row over its quad, then over the cluster in the order of its CTAs."""
        cfg = self.config
        for i in cutlass.range_constexpr(cute.size(rSumSq)):
            sum_sq = rSumSq[i]
            sum_sq += cute.arch.shuffle_sync_bfly(sum_sq, 1)
            sum_sq += cute.arch.shuffle_sync_bfly(sum_sq, 2)
            rSumSq[i] = sum_sq
        if const_expr(cfg.has_cluster_norm):
            slot = iteration & 1
            offset = slot * CONSUMER_WARPGROUPS + self.thread.warpgroup
            barrier = self.row_sums.barriers + offset
            self.exchange_rows(rSumSq, self.row_sums.sSum, barrier, slot, iteration // 2 & 1)

    @cute.jit
    def exchange_rows(
        self,
        rSumSq: cute.Tensor,
        sSum: cute.Tensor,
        barrier: cute.Pointer,
        slot: Int32,
        phase: Int32,
    ):
        """Every CTA's sums to every CTA's shared memory; a lane of the quad per destination."""
        cfg, thread = self.config, self.thread
        cluster_n = cfg.tile.cluster_n
        rank = cute.arch.block_idx_in_cluster()
        rBits = cute.recast_tensor(rSumSq, Int32)
        for m in cutlass.range_constexpr(cfg.blocks_per_warpgroup):
            for r in cutlass.range_constexpr(2):
                if thread.quad_lane < cluster_n:
                    place = cute.crd2idx((thread.row(m, r), rank, slot), sSum.layout)
                    cute.arch.store_async_dsmem(
                        sSum.iterator + place, rBits[r, m], barrier, thread.quad_lane
                    )
        if thread.tidx % WARPGROUP_THREADS == 0:
            rows = cfg.tile_pixels // CONSUMER_WARPGROUPS
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, rows * cluster_n * 4)
        cute.arch.mbarrier_wait(barrier, phase)
        for m in cutlass.range_constexpr(cfg.blocks_per_warpgroup):
            for r in cutlass.range_constexpr(2):
                sum_sq = Float32(0.0)
                for cta in cutlass.range_constexpr(cluster_n):
                    sum_sq += sSum[thread.row(m, r), cta, slot]
                rSumSq[r, m] = sum_sq

    # Views of one thread's channels.

    @cute.jit
    def channel_vector(
        self, column: cutlass.Constexpr[int], tile: OutputTile, g: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """8 channels of group ``g`` of a per-channel vector."""
        vec = (tile.channel_tile * self.config.groups + g) * 4 + self.thread.quad_lane
        return cute.local_tile(self.sVec[None, column], (VEC,), (vec,))

    def pixel(self, tile: OutputTile, m: int, r: int) -> tuple:
        """(N, T, H, W, C) of accumulator row (m, r)."""
        thread = self.thread
        c, w, h, t, n = block_origin(self.config, tile, thread.block(m))
        row = h + thread.warp * 2 + r
        return (n, t, row, w + thread.column, c + thread.quad_lane * VEC)

    def output_row(self, pixel: tuple) -> tuple[cute.Tensor, Boolean]:
        """(VEC, G) of a pixel of the output, and whether it exists."""
        mO = self.outputs.mO
        n, _, h, w, _ = pixel
        is_inside = (w < mO.shape[3]) & (h < mO.shape[2])
        if self.config.tile.cluster_m > 1:
            is_inside = is_inside & (n < mO.shape[0])
        return self.vectors_of(mO, pixel), is_inside

    def cache_row(self, pixel: tuple, is_inside: Boolean) -> tuple[cute.Tensor, Boolean]:
        """As :meth:`output_row`, for the cache: its last frame is the output's last."""
        mO, mC = self.outputs.mO, self.outputs.mC
        n, t, h, w, c = pixel
        t = t - (mO.shape[1] - mC.shape[1])
        return self.vectors_of(mC, (n, t, h, w, c)), is_inside & (t >= 0)

    def vectors_of(self, mO: cute.Tensor, pixel: tuple) -> cute.Tensor:
        """(VEC, G) from a pixel on; the offset has 64 bits, as the strides do."""
        offset = cute.assume(cute.crd2idx(pixel, mO.layout), divby=VEC)
        layout = cute.make_layout((VEC, self.config.groups), stride=(1, 32))
        return cute.make_tensor(mO.iterator + offset, layout)


@cute.jit
def load_vector(r: cute.Tensor) -> cute.TensorSSA:
    """The accumulators of 8 consecutive channels, flat."""
    rFlat = cute.make_rmem_tensor(VEC, Float32)
    for i in cutlass.range_constexpr(VEC):
        rFlat[i] = r[i]
    return rFlat.load()


@cute.jit
def store_vector(x: cute.TensorSSA, r: cute.Tensor):
    """The reverse of :func:`load_vector`."""
    for i in cutlass.range_constexpr(VEC):
        r[i] = x[i]
