# SPDX-License-Identifier: Apache-2.0
"""Matrix product of activations and weights, with a choice of epilogues (sm_90a).

    acc[m, n] = sum_k f32(x[m, k]) * f32(w[n, k])          FP32, k in steps of 16
    y[m, n]   = A(acc)                                      plain, and the bands GATE and V
    y[m, n]   = A(rope(acc * rsqrt(mean(acc**2) + eps) * norm_weight))      bands Q and K

A rounds to the activation dtype, once. The mean is over a head; norm and RoPE are FP32.

Grid:           persistent, one CTA per SM; clusters take items of a static schedule
                (hopper_schedule).
Tile:           m x n outputs of a CTA from a table (hopper_tiles). Both consumer warpgroups share
                it, or each has its own and they take turns to multiply (ping-pong).
Warp roles:     warps 0-7    two consumer warpgroups: wgmma m64 x n x k16, then the epilogue.
                warp 8       TMA loads of x and w.
                warps 9-11   nothing; they complete the warpgroup whose registers are given away.
Pipeline:       full: ``stage_bytes``, one arrival that expects them;
                empty: 8 warps, 4 in ping-pong, x (cluster_m + cluster_n - 1) CTAs.
Row sums:       a barrier per warpgroup and slot, one arrival, which expects the bytes that the
                other CTA of a pair sends by st.async.
Cluster:        CTAs of neighbouring rows load slices of w for each other, those of neighbouring
                columns slices of x; the two halves of a head of 256 are such a pair.
Overlap:        with PDL the next grid may start at once; all memory is touched after the wait.
Shared memory:  stages, two boxes of output per warp, norm weights, row sums, barriers:
                ``smem_bytes``, at most 227 KiB.
Requires:       x, w and y 16-byte aligned with row pitches that are multiples of 8; K and N
                multiples of 8; B * S up to 2**31 - 1 rows.
Source:         written for this project; behaviour after the fused projection of cudnn-frontend's
                gated attention block. No code copied.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    PipelineState,
    PipelineTmaAsync,
    PipelineUserType,
    make_pipeline_state,
    pipeline_init_arrive,
    pipeline_init_wait,
)

from cudnn_blocks.stages.device.tma import TmaOperand
from cudnn_blocks.stages.gemm.hopper_config import (
    CONSUMER_REGISTERS,
    CONSUMER_THREADS,
    CONSUMER_WARPGROUPS,
    CONSUMER_WARPS,
    K_TILE,
    LOAD_WARP,
    MMA_K,
    MMA_M,
    NUM_THREADS,
    PRODUCER_REGISTERS,
    SMEM_ALIGN_BYTES,
    STORE_BUFFERS,
    STORE_COLUMNS,
    SUM_SLOTS,
    WARP_ROWS,
    WARPGROUP_THREADS,
    Fragment,
    GemmKernelConfig,
    smem_bytes,
)
from cudnn_blocks.stages.gemm.hopper_epilogue import (
    EpilogueRole,
    SumExchange,
    Thread,
)
from cudnn_blocks.stages.gemm.hopper_schedule import TileExtents, TileSchedule
from cudnn_blocks.stages.gemm.portable_operands import (
    DTYPES,
    NormRopeOperands,
    fake_operands,
    rows_of,
)

__all__ = ["GemmKernel", "GemmKernelConfig", "GemmNormRopeKernel", "fake_operands", "smem_bytes"]


@dataclass(frozen=True)
class TmaOperands:
    """Everything that moves by TMA."""

    x: TmaOperand
    w: TmaOperand
    y: TmaOperand


class NamedBarrier(IntEnum):
    """Barriers of a CTA beside the pipeline's."""

    ORDER = 1
    """And the next: one per warpgroup, where each has tiles of its own."""


@dataclass(frozen=True)
class SharedStorage:
    """Shared memory of one CTA."""

    sX: cute.Tensor
    """(M, K, STAGE)"""
    sB: cute.Tensor
    """(N, K, STAGE)"""
    sY: cute.Tensor
    """(COLUMN, ROW, (BUFFER, WARP))"""
    sW: cute.Tensor | None
    """(D, BAND)"""
    sSum: cute.Tensor | None
    """(ROW, SLOT, WARPGROUP)"""
    barriers: cute.Pointer
    sum_barriers: cute.Pointer | None
    """(SLOT, WARPGROUP)"""


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


class GemmKernel:
    """A plain product; see the module docstring."""

    def __init__(self, config: GemmKernelConfig):
        self.config = config

    @cute.jit
    def __call__(self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, stream):
        self.launch(x, w, y, None, stream)

    @cute.jit
    def launch(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        y: cute.Tensor,
        operands: NormRopeOperands | None,
        stream,
    ):
        cfg = self.config
        mX, mY = rows_of(x), rows_of(y)
        tile = cfg.tile
        extents = TileExtents.of(cfg, mY.shape[0], mY.shape[1])
        num_clusters = cutlass.min(extents.num_items, cfg.num_clusters)
        self.kernel(
            TmaOperands(
                load_operand(mX, stages_layout(cfg, tile.m, 1), (tile.m, K_TILE), tile.cluster_n),
                load_operand(w, stages_layout(cfg, tile.n, 1), (tile.n, K_TILE), tile.cluster_m),
                store_operand(mY),
            ),
            make_tiled_mma(cfg, cfg.fragment),
            make_tiled_mma(cfg, cfg.half_fragment),
            extents,
            mY.shape[0],
            (mX.shape[1] - 1) // K_TILE + 1,
            operands,
        ).launch(
            grid=(num_clusters * tile.cluster_size, 1, 1),
            block=(NUM_THREADS, 1, 1),
            cluster=(tile.cluster_size, 1, 1) if tile.cluster_size > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        tma: TmaOperands,
        tiled_mma: cute.TiledMma,
        half_tiled_mma: cute.TiledMma,
        extents: TileExtents,
        num_rows: Int32,
        num_k: Int32,
        operands: NormRopeOperands | None,
    ):
        cfg, tile = self.config, self.config.tile
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_idx = cute.arch.make_warp_uniform(tidx // WARPGROUP_THREADS)
        rank = Int32(0)
        if const_expr(tile.cluster_size > 1):
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        schedule = TileSchedule(
            cfg, extents, bidx // tile.cluster_size, rank % tile.cluster_m, rank // tile.cluster_m
        )
        if warp_idx == LOAD_WARP:
            for operand in (tma.x, tma.w, tma.y):
                cpasync.prefetch_descriptor(operand.atom)

        storage = self.allocate()
        pipeline = self.make_pipeline(storage, tidx)
        cluster_shape_mn = (tile.cluster_m, tile.cluster_n)
        pipeline_init_arrive(cluster_shape_mn=cluster_shape_mn, is_relaxed=True)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(storage.sW is not None):
            self.stage_weights(operands, storage.sW, tidx)
        cute.arch.sync_threads()
        pipeline_init_wait(cluster_shape_mn=cluster_shape_mn)

        if warpgroup_idx == CONSUMER_WARPGROUPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp_idx == LOAD_WARP:
                self.load(tma, storage, pipeline, schedule, num_k)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            sums = None
            if const_expr(cfg.exchanges_sums):
                peer = schedule.rank_m + tile.cluster_m * (1 - schedule.rank_n)
                sums = SumExchange(storage.sSum, storage.sum_barriers, peer)
            thread = Thread(tidx, warpgroup_idx)
            epilogue = EpilogueRole(
                cfg, thread, tma.y, storage.sY, num_rows, operands, storage.sW, sums
            )
            self.consume(tiled_mma, half_tiled_mma, storage, pipeline, epilogue, schedule, num_k)
        if const_expr(tile.cluster_size > 1):
            # No CTA leaves while another may still write to its shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def load(
        self,
        tma: TmaOperands,
        storage: SharedStorage,
        pipeline: PipelineTmaAsync,
        schedule: TileSchedule,
        num_k: Int32,
    ):
        """The load warp: fills stages in the order in which the consumers empty them."""
        cfg, tile = self.config, self.config.tile
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
                tma.x, storage.sX, origin.row, tile.m, schedule.rank_n, tile.cluster_n
            )
            tWsW, tWgW = partition_load(
                tma.w, storage.sB, origin.column, tile.n, schedule.rank_m, tile.cluster_m
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

    @cute.jit
    def consume(
        self,
        tiled_mma: cute.TiledMma,
        half_tiled_mma: cute.TiledMma,
        storage: SharedStorage,
        pipeline: PipelineTmaAsync,
        epilogue: EpilogueRole,
        schedule: TileSchedule,
        num_k: Int32,
    ):
        """A consumer warpgroup: its part of every item, mainloop and epilogue."""
        cfg = self.config
        fragment, num_whole = cfg.fragment, schedule.extents.num_whole
        mma = self.make_mma(tiled_mma, fragment, storage, pipeline, epilogue.thread)
        stage = make_pipeline_state(PipelineUserType.Consumer, cfg.tile.num_stages)
        item, exchanges = schedule.first_item, Int32(0)
        step = cfg.num_clusters
        if const_expr(cfg.tile.is_pingpong):
            item += epilogue.thread.warpgroup * step
            stage.advance(epilogue.thread.warpgroup * num_k)
        while item < num_whole:
            origin = schedule.tile(item)
            rTables = epilogue.prefetch_tables(fragment, origin)
            is_first, has_next = item == schedule.first_item, item + step < num_whole
            stage = mma.run(tiled_mma, stage, num_k, is_first, has_next)
            exchanges = epilogue.finish(mma.tCrC, fragment, origin, rTables, exchanges)
            item += step
            if const_expr(cfg.tile.is_pingpong):  # the next item is the other warpgroup's
                item += step
                stage.advance(num_k)
        if const_expr(cfg.tile.splits_tail):
            fragment = cfg.half_fragment
            if item < schedule.extents.num_items:
                half = self.make_mma(half_tiled_mma, fragment, storage, pipeline, epilogue.thread)
                origin = schedule.tile(item)
                rTables = epilogue.prefetch_tables(fragment, origin)
                stage = half.run(half_tiled_mma, stage, num_k, Boolean(True), Boolean(False))
                epilogue.finish(half.tCrC, fragment, origin, rTables, exchanges)
        cute.arch.cp_async_bulk_wait_group(0)

    def make_mma(
        self,
        tiled_mma: cute.TiledMma,
        fragment: Fragment,
        storage: SharedStorage,
        pipeline: PipelineTmaAsync,
        thread: Thread,
    ) -> MmaRole:
        """The fragments of this thread's warpgroup; a split tile uses the first rows of a stage."""
        tile = self.config.tile
        warpgroups = cute.make_layout(fragment.warpgroups, stride=WARPGROUP_THREADS)
        place = thread.warpgroup if fragment.warpgroups > 1 else 0
        thr_mma = tiled_mma.get_slice(warpgroups(place))
        sA = cute.make_tensor(
            storage.sX.iterator,
            cute.make_layout(
                (fragment.rows, K_TILE, tile.num_stages), stride=(K_TILE, 1, tile.m * K_TILE)
            ),
        )
        return MmaRole(
            self.config,
            pipeline,
            thread.warpgroup,
            tCrA=tiled_mma.make_fragment_A(thr_mma.partition_A(sA)),
            tCrB=tiled_mma.make_fragment_B(thr_mma.partition_B(storage.sB)),
            tCrC=cute.make_rmem_tensor(
                tiled_mma.partition_shape_C((fragment.rows, tile.n)), Float32
            ),
        )

    def allocate(self) -> SharedStorage:
        """Shared memory in the order of :func:`smem_bytes`."""
        cfg, tile = self.config, self.config.tile
        dtype, smem = DTYPES[cfg.dtype], SmemAllocator()
        sX, sB = (
            smem.allocate_tensor(
                dtype, stages_layout(cfg, rows), byte_alignment=SMEM_ALIGN_BYTES, swizzle=swizzle()
            )
            for rows in (tile.m, tile.n)
        )
        box = WARP_ROWS * STORE_COLUMNS
        layout = cute.make_layout(
            (STORE_COLUMNS, WARP_ROWS, (STORE_BUFFERS, CONSUMER_WARPS)),
            stride=(1, STORE_COLUMNS, (box, STORE_BUFFERS * box)),
        )
        sY = smem.allocate_tensor(dtype, layout, byte_alignment=SMEM_ALIGN_BYTES, swizzle=swizzle())
        sW, sSum, sum_barriers = None, None, None
        if cfg.weight_elements:
            layout = cute.make_layout((cfg.weight_elements // 2, 2))
            sW = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        if cfg.exchanges_sums:
            layout = cute.make_layout((tile.m, SUM_SLOTS, CONSUMER_WARPGROUPS))
            sSum = smem.allocate_tensor(Float32, layout, byte_alignment=16)
            sum_barriers = smem.allocate_array(Int64, cfg.sum_barriers)
        barriers = smem.allocate_array(Int64, 2 * tile.num_stages)
        return SharedStorage(sX, sB, sY, sW, sSum, barriers, sum_barriers)

    @cute.jit
    def make_pipeline(self, storage: SharedStorage, tidx: Int32) -> PipelineTmaAsync:
        """Initialises all barriers; nobody may use them before the cluster has met."""
        cfg, tile = self.config, self.config.tile
        if const_expr(cfg.exchanges_sums):
            if tidx == 0:
                for i in cutlass.range_constexpr(cfg.sum_barriers):
                    cute.arch.mbarrier_init(storage.sum_barriers + i, 1)
        return PipelineTmaAsync.create(
            barrier_storage=storage.barriers,
            num_stages=tile.num_stages,
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, cfg.empty_arrivals),
            tx_count=cfg.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, tile.cluster_m, tile.cluster_n, 1)),
            mcast_mode_mn=(1, 1),
            defer_sync=True,
        )

    @cute.jit
    def stage_weights(self, operands: NormRopeOperands, sW: cute.Tensor, tidx: Int32):
        """Widens the norm weights into shared memory."""
        if tidx < self.config.norm_rope.d_head:
            sW[tidx, 0] = operands.mWq[tidx].to(Float32)
            sW[tidx, 1] = operands.mWk[tidx].to(Float32)


class GemmNormRopeKernel(GemmKernel):
    """The fused projection; see the module docstring."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        y: cute.Tensor,
        w_q_norm: cute.Tensor | None,
        w_k_norm: cute.Tensor | None,
        cos: cute.Tensor,
        sin: cute.Tensor,
        eps: Float32,
        stream,
    ):
        seq_len = cute.fast_divmod_create_divisor_v2(x.shape[1])
        operands = NormRopeOperands(w_q_norm, w_k_norm, cos, sin, seq_len, eps)
        self.launch(x, w, y, operands, stream)


def swizzle() -> cute.Swizzle:
    """128-byte swizzle, of the stages and of the boxes on their way out."""
    return cute.make_swizzle(3, 4, 3)


def stages_layout(cfg: GemmKernelConfig, rows: int, num_stages: int | None = None) -> cute.Layout:
    """(ROW, K, STAGE), one 128-byte row after the other."""
    if num_stages is None:
        num_stages = cfg.tile.num_stages
    return cute.make_layout((rows, K_TILE, num_stages), stride=(K_TILE, 1, rows * K_TILE))


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
    rows: cutlass.Constexpr[int],
    rank: Int32,
    num_multicast: cutlass.Constexpr[int],
):
    """(BOX, STAGE) of shared memory; (BOX, K_TILE) of the tensor from a row on."""
    gX = cute.local_tile(cute.domain_offset((first_row, 0), tma.tensor), (rows, K_TILE), (0, None))
    return cpasync.tma_partition(
        tma.atom,
        rank if const_expr(num_multicast > 1) else 0,
        cute.make_layout(num_multicast),
        cute.group_modes(sX, 0, 2),
        cute.group_modes(gX, 0, 2),
    )


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
