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
from cudnn_blocks.stages.gemm.epilogues import element_bytes
from cudnn_blocks.stages.gemm.hopper_config import (
    CONSUMER_THREADS,
    MMA_K_BYTES,
    MMA_M,
    ROW_BYTES,
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
                tma.x, self.sX, origin.row, (tile.m, cfg.k_tile), schedule.rank_n, tile.cluster_n
            )
            tWsW, tWgW = partition_load(
                tma.w, self.sB, origin.column, (tile.n, cfg.k_tile), schedule.rank_m, tile.cluster_m
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
        if const_expr(self.config.promote_every > 0):
            return self.run_promoted(tiled_mma, stage, num_k)
        return self.run_in_one(tiled_mma, stage, num_k, is_first, has_next)

    @cute.jit
    def run_in_one(
        self,
        tiled_mma: cute.TiledMma,
        stage: PipelineState,
        num_k: Int32,
        is_first: Boolean,
        has_next: Boolean,
    ) -> PipelineState:
        """All of K in the tensor cores' sums."""
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
            for k in cutlass.range_constexpr(ROW_BYTES // MMA_K_BYTES):
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

    @cute.jit
    def run_promoted(
        self, tiled_mma: cute.TiledMma, stage: PipelineState, num_k: Int32
    ) -> PipelineState:
        """As :meth:`run`, with the sums of every few stages added to ``tCrC`` in FP32.

        The tensor cores keep some 14 bits of an FP8 product's sum. Block by block, a few stages'
        sums go into registers of their own; the other warpgroup multiplies while they are added.
        """
        pipeline, tCrB, tCrC = self.pipeline, self.tCrB, self.tCrC
        tCrA = cute.logical_divide(self.tCrA, (None, 1))  # (MMA, (1, BLOCK), MMA_K, STAGE)
        every = self.config.promote_every
        rPart = cute.make_rmem_tensor((tCrC.shape[0], 1, 1), Float32)
        tCrC.fill(0.0)
        for first in cutlass.range(0, num_k, every, unroll=1):
            count = 1 if const_expr(every == 1) else cutlass.min(num_k - first, every)
            for block in cutlass.range_constexpr(cute.size(tCrC, mode=[1])):
                ahead = stage.clone()
                tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
                for _ in cutlass.range(count, unroll=1):
                    pipeline.consumer_wait(ahead)
                    warpgroup.fence()
                    for k in cutlass.range_constexpr(ROW_BYTES // MMA_K_BYTES):
                        tCrA_k = tCrA[None, (None, block), k, ahead.index]
                        tCrB_k = tCrB[None, None, k, ahead.index]
                        cute.gemm(tiled_mma, rPart, tCrA_k, tCrB_k, rPart)
                        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                    warpgroup.commit_group()
                    ahead.advance()
                warpgroup.wait_group(0)
                rSum = tCrC[None, block, 0]
                for i in cutlass.range_constexpr(cute.size(rSum)):
                    rSum[i] = rSum[i] + rPart[i]
            for _ in cutlass.range(count, unroll=1):
                pipeline.consumer_release(stage)
                stage.advance()
        return stage


def make_tiled_mma(cfg: GemmKernelConfig, fragment: Fragment) -> cute.TiledMma:
    """Warpgroups along M, each with the tile's columns, or along N for one m64 block."""
    dtype, k_major = DTYPES[cfg.dtype], OperandMajorMode.K
    shape = (MMA_M, fragment.columns, MMA_K_BYTES // element_bytes(cfg.dtype))
    source = warpgroup.OperandSource.SMEM
    if cfg.is_fp8:
        op = warpgroup.MmaF8Op(dtype, dtype, Float32, shape, source, k_major, k_major)
    else:
        op = warpgroup.MmaF16BF16Op(dtype, Float32, shape, source, k_major, k_major)
    warpgroups = (fragment.warpgroups_m, fragment.warpgroups_n, 1)
    return cute.make_tiled_mma(cute.make_mma_atom(op), warpgroups)
