# SPDX-License-Identifier: Apache-2.0
"""Mainloop of the Hopper Conv3D kernel: the warp that loads and the warpgroups that multiply.

K order: filter plane, 64-channel chunk, tap, k16. It depends on Ci alone, so that the bits of an
output do not depend on the tile, the chunk of the clip or the place in either. A plane whose input
frame is known to be zero is left out, which leaves out nothing but additions of zero.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.pipeline import (
    PipelineState,
    PipelineTmaAsync,
    PipelineUserType,
    make_pipeline_state,
)

from cudnn_blocks.stages.conv3d.hopper_config import (
    BLOCK_PIXELS,
    BLOCK_SIDE,
    CHUNK,
    CONSUMER_WARPGROUPS,
    MMA_K,
    NUM_PLANES,
    TAPS_PER_PLANE,
    Conv3dKernelConfig,
)
from cudnn_blocks.stages.conv3d.hopper_operands import (
    Stages,
    TmaOperands,
    halo_box,
    pixel_box,
    weight_box,
)
from cudnn_blocks.stages.conv3d.hopper_schedule import TileSchedule, block_origin
from cudnn_blocks.stages.device.tma import partition_box


@dataclass(frozen=True)
class LoadRole:
    """The load warp: fills stages in the order in which the consumers empty them."""

    config: Conv3dKernelConfig
    tma: TmaOperands
    stages: Stages
    halo_pipeline: PipelineTmaAsync
    weight_pipeline: PipelineTmaAsync
    schedule: TileSchedule

    @cute.jit
    def run(self):
        """Per tile, halo and taps of each chunk of each plane, then the residual."""
        cfg, schedule = self.config, self.schedule
        halo_pipeline, weight_pipeline = self.halo_pipeline, self.weight_pipeline
        tWsW, tWgW = self.partition_weight()
        halo = make_pipeline_state(PipelineUserType.Producer, cfg.halo_pipeline.num_stages)
        weight = make_pipeline_state(PipelineUserType.Producer, cfg.weight_pipeline.num_stages)
        unit = schedule.first_unit
        while unit < schedule.num_units:
            tile = schedule.tile(unit)
            for plane in cutlass.range(schedule.first_plane(unit), NUM_PLANES, unroll=1):
                for chunk in cutlass.range(cfg.num_chunks, unroll=1):
                    halo_pipeline.producer_acquire(halo)
                    frame = schedule.halo_frame(tile, plane)
                    origin = (chunk * CHUNK, tile.w, tile.h, frame, tile.n)
                    self.load_halo(origin, halo)
                    halo.advance()
                    for tap in cutlass.range(TAPS_PER_PLANE, unroll=1):
                        weight_pipeline.producer_acquire(weight)
                        column = (plane * TAPS_PER_PLANE + tap) * cfg.num_chunks + chunk
                        self.load_weight(tWgW[None, column, tile.channel_tile], tWsW, weight)
                        weight.advance()
            if const_expr(cfg.has_residual):
                for block in cutlass.range(cfg.tile_pixels // BLOCK_PIXELS, unroll=1):
                    weight_pipeline.producer_acquire(weight)
                    self.load_residual(block_origin(cfg, tile, block), weight)
                    weight.advance()
            unit += cfg.num_clusters
        halo_pipeline.producer_tail(halo)
        weight_pipeline.producer_tail(weight)

    @cute.jit
    def partition_weight(self) -> tuple[cute.Tensor, cute.Tensor]:
        """(BOX, STAGE) of shared memory; (BOX, COLUMN, CHANNEL_TILE) of the packed weight."""
        tma = self.tma.weight
        gW = cute.local_tile(tma.tensor, weight_box(self.config), (None, 0, 0, 0, None))
        sW = cute.group_modes(self.stages.sW, 0, 5)
        return cpasync.tma_partition(
            tma.atom, 0, cute.make_layout(1), sW, cute.group_modes(gW, 0, 5)
        )

    @cute.jit
    def load_halo(self, origin: tuple, stage: PipelineState):
        """One chunk of one plane, or this CTA's slice of it for the whole channel cluster."""
        cfg, tma = self.config, self.tma.halo
        cluster_n = cfg.tile.cluster_n
        rank, mask = 0, None
        if const_expr(cluster_n > 1):
            rank, mask = self.schedule.cta_rank, Int16((1 << cluster_n) - 1)
        ctas = cute.make_layout(cluster_n)
        tXsX, tXgX = partition_box(tma, halo_box(cfg), origin, self.stages.sX, rank, ctas)
        full = self.halo_pipeline.producer_get_barrier(stage)
        cute.copy(tma.atom, tXgX, tXsX[None, stage.index], tma_bar_ptr=full, mcast_mask=mask)

    @cute.jit
    def load_weight(self, tWgW: cute.Tensor, tWsW: cute.Tensor, stage: PipelineState):
        """One tap of one chunk; the CTAs of a pixel cluster take turns to send it to all."""
        atom, cluster_m = self.tma.weight.atom, self.config.tile.cluster_m
        full = self.weight_pipeline.producer_get_barrier(stage)
        if const_expr(cluster_m > 1):
            if stage.count % cluster_m == self.schedule.cta_rank:
                mask = Int16((1 << cluster_m) - 1)
                cute.copy(atom, tWgW, tWsW[None, stage.index], tma_bar_ptr=full, mcast_mask=mask)
        else:
            cute.copy(atom, tWgW, tWsW[None, stage.index], tma_bar_ptr=full)

    @cute.jit
    def load_residual(self, origin: tuple, stage: PipelineState):
        """64 pixels of residual into a weight stage."""
        tma = self.tma.residual
        tRsR, tRgR = partition_box(tma, pixel_box(self.config, BLOCK_SIDE), origin, self.stages.sR)
        full = self.weight_pipeline.producer_get_barrier(stage)
        cute.copy(tma.atom, tRgR, tRsR[None, stage.index], tma_bar_ptr=full)


@dataclass(frozen=True)
class MmaRole:
    """The tensor-core part of a consumer warpgroup."""

    config: Conv3dKernelConfig
    halo_pipeline: PipelineTmaAsync
    weight_pipeline: PipelineTmaAsync
    tCrA: cute.Tensor
    """(MMA, MMA_M, MMA_K, R, S, STAGE)"""
    tCrB: cute.Tensor
    """(MMA, MMA_N, MMA_K, STAGE)"""
    tCrC: cute.Tensor
    """(MMA, MMA_M, MMA_N)"""

    @cute.jit
    def run(
        self,
        tiled_mma: cute.TiledMma,
        halo: PipelineState,
        weight: PipelineState,
        first_plane: Int32,
    ) -> tuple[PipelineState, PipelineState]:
        """Accumulates one tile into ``tCrC``; returns the states after it.

        A commit group per tap, and one in flight while the next is issued: the stages that the
        group before it read are released then, a weight stage per tap and a halo stage per nine.
        """
        cfg, tCrA, tCrB, tCrC = self.config, self.tCrA, self.tCrB, self.tCrC
        halo_pipeline, weight_pipeline = self.halo_pipeline, self.weight_pipeline
        halo_read, weight_read = halo.clone(), weight.clone()
        steps_per_plane = cfg.num_chunks // cfg.chunks_per_step
        first_step = first_plane * steps_per_plane
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        for step in cutlass.range(first_step, NUM_PLANES * steps_per_plane, unroll=1):
            for chunk in cutlass.range_constexpr(cfg.chunks_per_step):
                halo_pipeline.consumer_wait(halo)
                for tap in cutlass.range_constexpr(TAPS_PER_PLANE):
                    weight_pipeline.consumer_wait(weight)
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(cfg.k_blocks(chunk)):
                        tCrA_tap = tCrA[None, None, k, tap // 3, tap % 3, halo.index]
                        tCrB_tap = tCrB[None, None, k, weight.index]
                        cute.gemm(tiled_mma, tCrC, tCrA_tap, tCrB_tap, tCrC)
                        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)
                    if const_expr(chunk == 0 and tap == 0):
                        if step > first_step:
                            weight_pipeline.consumer_release(weight_read)
                            weight_read.advance()
                            halo_pipeline.consumer_release(halo_read)
                            halo_read.advance()
                    else:
                        weight_pipeline.consumer_release(weight_read)
                        weight_read.advance()
                        if const_expr(tap == 0):
                            halo_pipeline.consumer_release(halo_read)
                            halo_read.advance()
                    weight.advance()
                halo.advance()
        warpgroup.wait_group(0)
        weight_pipeline.consumer_release(weight_read)
        halo_pipeline.consumer_release(halo_read)
        return halo, weight


def make_tiled_mma(cfg: Conv3dKernelConfig) -> cute.TiledMma:
    """Warpgroups along M, each with m64 blocks of the whole ``n_tile``."""
    op = warpgroup.MmaF16BF16Op(
        BFloat16,
        Float32,
        (BLOCK_PIXELS, cfg.tile.n_tile, MMA_K),
        warpgroup.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    return cute.make_tiled_mma(cute.make_mma_atom(op), (CONSUMER_WARPGROUPS, 1, 1))
