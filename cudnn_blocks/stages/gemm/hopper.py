# SPDX-License-Identifier: Apache-2.0
"""Matrix product of activations and weights, with a choice of epilogues (sm_90a).

    acc[m, n] = sum_k f32(x[m, k]) * f32(w[n, k])          FP32, k in steps of 16
    y[m, n]   = A(acc)                                      plain, and the bands GATE and V
    y[m, n]   = A(rope(acc * rsqrt(mean(acc**2) + eps) * norm_weight))      bands Q and K

A rounds to the activation dtype, once. The mean is over a head; norm and RoPE are FP32. With a
factor all of it works on ``alpha * acc``, rounded to FP32; e4m3 codes have one, and become BF16:

    q8, k8, v8 = sat_e4m3(FP32 result * scale of the band)      GATE stays BF16, on its own

K of codes goes in steps of 32. The tensor cores keep some 14 bits of their sums, which are added to
FP32 registers every ``promote_every`` stages of 128 codes; 0 leaves all of K to them.

Grid:           persistent, one CTA per SM; clusters take items of a static schedule
                (hopper_schedule).
Tile:           m x n outputs of a CTA from a table (hopper_tiles). Both consumer warpgroups share
                it, or each has its own and they take turns to multiply (ping-pong). Where sums
                are promoted, one adds while the other multiplies.
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
Requires:       x, w and y 16-byte aligned with row pitches that are multiples of 8, of 16 for
                codes; K and N multiples of 8, K of codes of 16; B * S up to 2**31 - 1 rows.
Source:         written for this project; behaviour after the fused projection of cudnn-frontend's
                gated attention block. No code copied.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    PipelineTmaAsync,
    PipelineUserType,
    make_pipeline_state,
    pipeline_init_arrive,
    pipeline_init_wait,
)

from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.gemm.entry_points import CodedNormRoped, NormRoped, Plain, Scaled
from cudnn_blocks.stages.gemm.hopper_codes import CodeRole
from cudnn_blocks.stages.gemm.hopper_config import (
    CONSUMER_REGISTERS,
    CONSUMER_WARPGROUPS,
    CONSUMER_WARPS,
    LOAD_WARP,
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
from cudnn_blocks.stages.gemm.hopper_epilogue import EpilogueRole
from cudnn_blocks.stages.gemm.hopper_mainloop import LoadRole, MmaRole, make_tiled_mma
from cudnn_blocks.stages.gemm.hopper_norm_rope import NormRopeRole, SumExchange
from cudnn_blocks.stages.gemm.hopper_operands import (
    TmaOperands,
    load_operand,
    stages_layout,
    store_operand,
    swizzle,
)
from cudnn_blocks.stages.gemm.hopper_schedule import Thread, TileExtents, TileSchedule
from cudnn_blocks.stages.gemm.portable_operands import NormRopeOperands, fake_operands, rows_of

__all__ = ["GemmKernel", "GemmKernelConfig", "GemmNormRopeKernel", "fake_operands", "smem_bytes"]


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


class GemmKernel(Plain):
    """A plain product; see the module docstring."""

    def __init__(self, config: GemmKernelConfig):
        self.config = config

    @cute.jit
    def launch(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        y: cute.Tensor,
        operands: NormRopeOperands | None,
        alpha: Float32 | None,
        stream,
    ):
        cfg = self.config
        mX, mY = rows_of(x), rows_of(y)
        tile = cfg.tile
        columns = w.shape[0] if const_expr(cfg.has_codes) else mY.shape[1]
        extents = TileExtents.of(cfg, mY.shape[0], columns)
        num_clusters = cutlass.min(extents.num_items, cfg.num_clusters)
        self.kernel(
            TmaOperands(
                load_operand(
                    mX, stages_layout(cfg, tile.m, 1), (tile.m, cfg.k_tile), tile.cluster_n
                ),
                load_operand(
                    w, stages_layout(cfg, tile.n, 1), (tile.n, cfg.k_tile), tile.cluster_m
                ),
                store_operand(mY),
            ),
            make_tiled_mma(cfg, cfg.fragment),
            make_tiled_mma(cfg, cfg.half_fragment),
            extents,
            mY.shape[0],
            (mX.shape[1] - 1) // cfg.k_tile + 1,
            operands,
            alpha,
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
        alpha: Float32 | None,
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
                LoadRole(cfg, tma, storage.sX, storage.sB, pipeline, schedule).run(num_k)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            thread, norm_rope = Thread(tidx, warpgroup_idx), None
            if const_expr(operands is not None):
                sums = self.sum_exchange(storage, schedule)
                norm_rope = NormRopeRole(cfg, thread, num_rows, operands, storage.sW, sums)
            codes = None
            if const_expr(cfg.has_codes):
                codes = CodeRole(cfg, thread, num_rows, operands.bands)
            epilogue = EpilogueRole(cfg, thread, tma.y, storage.sY, norm_rope, alpha, codes)
            self.consume(tiled_mma, half_tiled_mma, storage, pipeline, epilogue, schedule, num_k)
        if const_expr(tile.cluster_size > 1):
            # No CTA leaves while another may still write to its shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

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
            rTables = epilogue.prepare(fragment, origin)
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
                rTables = epilogue.prepare(fragment, origin)
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
        k_tile = self.config.k_tile
        sA = cute.make_tensor(
            storage.sX.iterator,
            cute.make_layout(
                (fragment.rows, k_tile, tile.num_stages), stride=(k_tile, 1, tile.m * k_tile)
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

    def sum_exchange(self, storage: SharedStorage, schedule: TileSchedule) -> SumExchange | None:
        """Where the other CTA of a pair leaves its sums; None where it has none to show."""
        if not self.config.exchanges_sums:
            return None
        peer = schedule.rank_m + self.config.tile.cluster_m * (1 - schedule.rank_n)
        return SumExchange(storage.sSum, storage.sum_barriers, peer)

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
        sY = smem.allocate_tensor(
            DTYPES[cfg.output_dtype],
            layout,
            byte_alignment=SMEM_ALIGN_BYTES,
            swizzle=swizzle(),
        )
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


class GemmScaledKernel(Scaled, GemmKernel):
    """A plain product with a factor; see the module docstring."""


class GemmNormRopeKernel(NormRoped, GemmKernel):
    """The fused projection; see the module docstring."""


class GemmCodedNormRopeKernel(CodedNormRoped, GemmKernel):
    """The fused projection of codes; see the module docstring."""
