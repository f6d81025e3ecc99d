# SPDX-License-Identifier: Apache-2.0
"""Mainloop of the Hopper GEMM kernel: the warp that loads and the warpgroups that multiply.

K goes in steps of 16, in one order for every tile, so that the bits of a result do not depend on
the tile or on the rows beside it.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import (
    PipelineState,
    PipelineTmaAsync,
    PipelineUserType,
    make_pipeline_state,
)

from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.gemm.hopper_config import (
    CONSUMER_THREADS,
    K_TILE,
    MMA_K,
    MMA_M,
    Fragment,
    GemmKernelConfig,
)
from cudnn_blocks.stages.gemm.hopper_operands import TmaOperands, partition_load
from cudnn_blocks.stages.gemm.hopper_schedule import TileSchedule


class NamedBarrier(IntEnum):
    """Barriers of a CTA beside the pipeline's."""

    ORDER = 1
    """And the next: one per warpgroup, where each has tiles of its own."""


@dataclass(frozen=True)
class LoadRole:
    """The load warp."""

    config: GemmKernelConfig
    tma: TmaOperands
    sX: cute.Tensor
    """(M, K, STAGE)"""
    sB: cute.Tensor
    """(N, K, STAGE)"""
    pipeline: PipelineTmaAsync
    schedule: TileSchedule

    @cute.jit
    def run(self, num_k: Int32):
        """Fills stages in the order in which the consumers empty them."""
        cfg, tile = self.config, self.config.tile
        tma, pipeline, schedule = self.tma, self.pipeline, self.schedule
        mask_x, mask_w = None, None
        if const_expr(tile.cluster_n > 1):
            ctas = sum(1 << tile.cluster_m * n for n in range(tile.cluster_n))
            mask_x = Int16(ctas << schedule.rank_m)
        if const_expr(tile.cluster_m > 1):
            mask_w = Int16((1 << tile.cluster_m) - 1 << schedule.rank_n * tile.cluster_m)
        stage = make_pipeline_state(PipelineUserType.Producer, tile.num_stages)
        item = schedule.first_item
        while item < schedule.extents.num_items:
            origin = schedule.tile(item)
            tXsX, tXgX = partition_load(
                tma.x, self.sX, origin.row, tile.m, schedule.rank_n, tile.cluster_n
            )
            tWsW, tWgW = partition_load(
                tma.w, self.sB, origin.column, tile.n, schedule.rank_m, tile.cluster_m
            )
            for k in cutlass.range(num_k, unroll=1):
                pipeline.producer_acquire(stage)
                full = pipeline.producer_get_barrier(stage)
                cute.copy(
                    tma.x.atom,
                    tXgX[None, k],
                    tXsX[None, stage.index],
                    tma_bar_ptr=full,
                    mcast_mask=mask_x,
                )
                cute.copy(
                    tma.w.atom,
                    tWgW[None, k],
                    tWsW[None, stage.index],
                    tma_bar_ptr=full,
                    mcast_mask=mask_w,
                )
                stage.advance()
            item += cfg.num_clusters
        pipeline.producer_tail(stage)


@dataclass(frozen=True)
class MmaRole:
    """The tensor-core part of a consumer warpgroup, for one kind of fragment."""

    config: GemmKernelConfig
    pipeline: PipelineTmaAsync
    warpgroup: Int32
    tCrA: cute.Tensor
    """(MMA, MMA_M, MMA_K, STAGE)"""
    tCrB: cute.Tensor
    """(MMA, MMA_N, MMA_K, STAGE)"""
    tCrC: cute.Tensor
    """(MMA, MMA_M, MMA_N)"""

    @cute.jit
    def run(
        self,
        tiled_mma: cute.TiledMma,
        stage: PipelineState,
        num_k: Int32,
        is_first: Boolean,
        has_next: Boolean,
    ) -> PipelineState:
        """Accumulates one tile into ``tCrC``; returns the state after it.

        A commit group per stage, and one in flight while the next is issued: the stage that the
        group before it read is released then. In ping-pong the warpgroups take turns, since the
        parity of a barrier tells one phase from the next one only; ``is_first`` and ``has_next``
        say whether the CTA has a tile before and behind this one.
        """
        pipeline, tCrA, tCrB, tCrC = self.pipeline, self.tCrA, self.tCrB, self.tCrC
        is_pingpong = self.config.tile.is_pingpong
        read = stage.clone()
        if const_expr(is_pingpong):
            if not is_first:
                cute.arch.barrier(
                    barrier_id=NamedBarrier.ORDER + self.warpgroup,
                    number_of_threads=CONSUMER_THREADS,
                )
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        for k_tile in cutlass.range(num_k, unroll=1):
            pipeline.consumer_wait(stage)
            warpgroup.fence()
            for k in cutlass.range_constexpr(K_TILE // MMA_K):
                tCrA_k = tCrA[None, None, k, stage.index]
                tCrB_k = tCrB[None, None, k, stage.index]
                cute.gemm(tiled_mma, tCrC, tCrA_k, tCrB_k, tCrC)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if k_tile > 0:
                pipeline.consumer_release(read)
                read.advance()
            stage.advance()
        if const_expr(is_pingpong):
            if has_next:
                cute.arch.barrier_arrive(
                    barrier_id=NamedBarrier.ORDER + (1 - self.warpgroup),
                    number_of_threads=CONSUMER_THREADS,
                )
        warpgroup.wait_group(0)
        pipeline.consumer_release(read)
        return stage


def make_tiled_mma(cfg: GemmKernelConfig, fragment: Fragment) -> cute.TiledMma:
    """Warpgroups along M, each with the tile's columns, or along N for one m64 block."""
    op = warpgroup.MmaF16BF16Op(
        DTYPES[cfg.dtype],
        Float32,
        (MMA_M, fragment.columns, MMA_K),
        warpgroup.OperandSource.SMEM,
        OperandMajorMode.K,
        OperandMajorMode.K,
    )
    warpgroups = (fragment.warpgroups_m, fragment.warpgroups_n, 1)
    return cute.make_tiled_mma(cute.make_mma_atom(op), warpgroups)
