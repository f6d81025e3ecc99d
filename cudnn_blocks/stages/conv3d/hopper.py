# SPDX-License-Identifier: Apache-2.0
"""Valid 3x3x3 convolution of NTHWC activations with fused post-operations (sm_90a).

    conv  = B(sum_k f32(input) * f32(weight))                 FP32, in the order of hopper_mainloop
    value = B(conv + bias)                                    not raw
    value = B(value + B(residual + residual_bias))            with a residual; its bias is optional
    den   = max(sqrt(sum_c value**2), 1e-12)                  norm and norm_pad, over all of Co
    out   = B(silu(B(B(B(value / den) * sqrt(Co)) * gamma)))

B rounds to BF16. ``raw`` stores conv, ``bias_residual_pad`` value, ``norm`` and ``norm_pad`` out,
and value too where there is a residual. ``norm_pad`` writes the interior of a padded activation,
zeros its borders and the planes of missing history, and writes the last frames to the cache too.

Grid:           persistent, one CTA per SM; clusters take units of a static schedule
                (hopper_schedule).
Tile:           256 or 128 pixels of a frame x ``n_tile`` channels, from tables (hopper_tiles).
Warp roles:     warps 0-7    two consumer warpgroups: wgmma m64 x n_tile x k16, then the epilogue.
                warp 8       TMA loads of halo, weight and residual.
                warps 9-11   zeros around the output, where there are any.
Pipelines:      halo         full: ``halo_bytes``; empty: 8 warps x cluster_n CTAs.
                weight       full: ``weight_stage_bytes``; empty: 8 warps x cluster_m CTAs.
                             Behind the taps of a tile it carries the residual.
                row sums     a barrier per warpgroup and slot: the sums of every CTA of the cluster.
                Every full barrier has one arrival, which expects the bytes.
Cluster:        along Co for a norm over several CTAs (halo multicast, row sums by st.async), or
                along pixels for raw convolutions of 128-pixel tiles (weight multicast).
Shared memory:  halo and weight stages, channel vectors, row sums, barriers: ``smem_bytes``, at most
                227 KiB.
Requires:       operands contiguous and 16-byte aligned; Ci a multiple of 32; Co in
                ``CHANNEL_TILES``.
Source:         written for this project; behaviour after the fused Conv3D of cudnn-frontend. No
                code copied.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor
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

from cudnn_blocks.stages.conv3d.epilogues import BIAS_RESIDUAL_PAD, NORM_PAD
from cudnn_blocks.stages.conv3d.hopper_borders import LEADING_FRAMES, BorderRole
from cudnn_blocks.stages.conv3d.hopper_config import (
    BLOCK_SIDE,
    BORDER_WARPS,
    CONSUMER_WARPGROUPS,
    LOAD_WARP,
    NUM_THREADS,
    SMEM_ALIGN_BYTES,
    WARP_THREADS,
    WARPGROUP_THREADS,
    Conv3dKernelConfig,
    PipelineFacts,
)
from cudnn_blocks.stages.conv3d.hopper_epilogue import EpilogueRole, Outputs, RowSums, Thread
from cudnn_blocks.stages.conv3d.hopper_mainloop import LoadRole, MmaRole, make_tiled_mma
from cudnn_blocks.stages.conv3d.hopper_operands import (
    Stages,
    TmaOperands,
    halo_layout,
    halo_mma_layout,
    halo_operand,
    pixel_layout,
    residual_operand,
    swizzle,
    value_operand,
    weight_layout,
    weight_mma_layout,
    weight_operand,
)
from cudnn_blocks.stages.conv3d.hopper_schedule import TileExtents, TileSchedule


@dataclass(frozen=True)
class ChannelVectors:
    """Per-channel operands in global memory, None where the epilogue has none."""

    mBias: cute.Tensor | None
    mGamma: cute.Tensor | None
    mResidualBias: cute.Tensor | None


@dataclass(frozen=True)
class SharedStorage:
    """Shared memory of one CTA."""

    stages: Stages
    sVec: cute.Tensor | None
    """(C, VECTOR): bias, gamma, residual_bias."""
    row_sums: RowSums | None
    halo_barriers: cute.Pointer
    weight_barriers: cute.Pointer


class Conv3dKernel:
    """One convolution; see the module docstring."""

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
        mO = self.valid_sites(input, output)
        mV = mO if const_expr(cfg.epilogue == BIAS_RESIDUAL_PAD) else residual_output
        self.kernel(
            TmaOperands(
                halo_operand(cfg, input),
                weight_operand(cfg, packed_weight),
                residual_operand(cfg, residual),
                value_operand(cfg, mV),
            ),
            make_tiled_mma(cfg),
            ChannelVectors(bias, gamma, residual_bias),
            Outputs(mO, output if const_expr(cfg.has_borders) else None, cache_output),
            TileExtents.of_output(cfg, mO),
        ).launch(
            grid=(cfg.num_clusters * cfg.cluster_size, 1, 1),
            block=(NUM_THREADS, 1, 1),
            cluster=(cfg.cluster_size, 1, 1) if cfg.cluster_size > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.jit
    def valid_sites(self, mX: cute.Tensor, mO: cute.Tensor) -> cute.Tensor:
        """The output at its valid ``[N, T-2, H-2, W-2, Co]``, extents that clip and mask stores."""
        cfg = self.config
        if const_expr(cfg.has_borders):
            n, t, h, w, _ = mX.shape
            origin = (0, 0, 0, 0, 0)
            if const_expr(cfg.epilogue == NORM_PAD):
                origin = (0, LEADING_FRAMES, 1, 1, 0)
            sites = cute.make_layout((n, t - 2, h - 2, w - 2, cfg.out_channels), stride=mO.stride)
            mO = cute.make_tensor(cute.domain_offset(origin, mO).iterator, sites)
        return mO

    @cute.kernel
    def kernel(
        self,
        tma: TmaOperands,
        tiled_mma: cute.TiledMma,
        vectors: ChannelVectors,
        outputs: Outputs,
        extents: TileExtents,
    ):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(tidx // WARPGROUP_THREADS)
        cta_rank = Int32(0)
        if const_expr(cfg.cluster_size > 1):
            cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        schedule = TileSchedule(cfg, extents, bidx // cfg.cluster_size, cta_rank)
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(tma.halo.atom)
            cpasync.prefetch_descriptor(tma.weight.atom)

        storage = self.allocate()
        halo_pipeline, weight_pipeline = self.make_pipelines(storage, tidx)
        self.stage_vectors(vectors, storage.sVec, tidx)
        cluster_shape_mn = (cfg.tile.cluster_m, cfg.tile.cluster_n)
        pipeline_init_arrive(cluster_shape_mn=cluster_shape_mn, is_relaxed=True)
        cute.arch.sync_threads()
        pipeline_init_wait(cluster_shape_mn=cluster_shape_mn)

        if warpgroup == CONSUMER_WARPGROUPS:
            cute.arch.setmaxregister_decrease(cfg.producer_registers)
            if warp == LOAD_WARP:
                load = LoadRole(cfg, tma, storage.stages, halo_pipeline, weight_pipeline, schedule)
                load.run()
            elif const_expr(cfg.has_borders):
                worker = bidx * BORDER_WARPS + warp - (LOAD_WARP + 1)
                BorderRole(cfg).run(outputs.mO_padded, tidx % WARP_THREADS, worker)
        else:
            cute.arch.setmaxregister_increase(cfg.consumer_registers)
            thread = Thread(tidx, warpgroup)
            epilogue = EpilogueRole(
                cfg,
                thread,
                outputs,
                tma.value,
                storage.sVec,
                storage.stages.sV,
                storage.row_sums,
            )
            mma = self.make_mma(tiled_mma, storage.stages, halo_pipeline, weight_pipeline, thread)
            self.consume(tiled_mma, mma, epilogue, schedule)
        if const_expr(cfg.cluster_size > 1):
            # No CTA leaves while another may still write to its shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def make_mma(
        self,
        tiled_mma: cute.TiledMma,
        stages: Stages,
        halo_pipeline: PipelineTmaAsync,
        weight_pipeline: PipelineTmaAsync,
        thread: Thread,
    ) -> MmaRole:
        """The fragments of this thread's warpgroup."""
        cfg = self.config
        warpgroups = cute.make_layout(CONSUMER_WARPGROUPS, stride=WARPGROUP_THREADS)
        thr_mma = tiled_mma.get_slice(warpgroups(thread.warpgroup))
        shape = tiled_mma.partition_shape_C((cfg.tile_pixels, cfg.tile.n_tile))
        return MmaRole(
            cfg,
            halo_pipeline,
            weight_pipeline,
            tCrA=tiled_mma.make_fragment_A(thr_mma.partition_A(stages.sA)),
            tCrB=tiled_mma.make_fragment_B(thr_mma.partition_B(stages.sB)),
            tCrC=cute.make_rmem_tensor(shape, Float32),
        )

    @cute.jit
    def consume(
        self,
        tiled_mma: cute.TiledMma,
        mma: MmaRole,
        epilogue: EpilogueRole,
        schedule: TileSchedule,
    ):
        """A consumer warpgroup: its half of every tile, mainloop and epilogue."""
        cfg, tCrC = self.config, mma.tCrC
        halo = make_pipeline_state(PipelineUserType.Consumer, cfg.halo_pipeline.num_stages)
        weight = make_pipeline_state(PipelineUserType.Consumer, cfg.weight_pipeline.num_stages)
        iteration = Int32(0)
        unit = schedule.first_unit
        while unit < schedule.num_units:
            tile = schedule.tile(unit)
            halo, weight = mma.run(tiled_mma, halo, weight, schedule.first_plane(unit))
            if const_expr(cfg.is_raw):
                epilogue.store_raw(tCrC, tile)
            else:
                rSumSq = cute.make_rmem_tensor((2, cfg.blocks_per_warpgroup), Float32)
                rSumSq.fill(0.0)
                weight = epilogue.form_value(tCrC, rSumSq, mma.weight_pipeline, weight, tile)
                if const_expr(cfg.is_norm):
                    epilogue.normalise(tCrC, rSumSq, iteration, tile)
            iteration += 1
            unit += cfg.num_clusters

    def allocate(self) -> SharedStorage:
        """Shared memory in the order of :func:`smem_bytes`."""
        cfg = self.config
        smem = SmemAllocator()

        sX, sW = (
            smem.allocate_tensor(
                BFloat16, layout, byte_alignment=SMEM_ALIGN_BYTES, swizzle=swizzle()
            )
            for layout in (halo_layout(cfg), weight_layout(cfg))
        )
        plain = cute.recast_ptr(sW.iterator, dtype=BFloat16)  # without the swizzle
        stages = Stages(
            sX=sX,
            sA=cute.make_tensor(sX.iterator, halo_mma_layout(cfg)),
            sW=sW,
            sB=cute.make_tensor(sW.iterator, weight_mma_layout(cfg)),
            sR=cute.make_tensor(plain, pixel_layout(cfg, BLOCK_SIDE, cfg.num_weight_stages)),
            sV=cute.make_tensor(
                plain, pixel_layout(cfg, 2, BLOCK_SIDE // 2, cfg.num_weight_stages)
            ),
        )
        sVec, row_sums = None, None
        if cfg.num_vectors:
            layout = cute.make_layout((cfg.out_channels, cfg.num_vectors))
            sVec = smem.allocate_tensor(BFloat16, layout, byte_alignment=16)
        if cfg.has_cluster_norm:
            layout = cute.make_layout((cfg.tile_pixels, cfg.tile.cluster_n, 2))
            sSum = smem.allocate_tensor(Float32, layout, byte_alignment=16)
            row_sums = RowSums(sSum, smem.allocate_array(Int64, 2 * CONSUMER_WARPGROUPS))
        return SharedStorage(
            stages,
            sVec,
            row_sums,
            smem.allocate_array(Int64, 2 * cfg.num_halo_stages),
            smem.allocate_array(Int64, 2 * cfg.num_weight_stages),
        )

    @cute.jit
    def make_pipelines(
        self, storage: SharedStorage, tidx: Int32
    ) -> tuple[PipelineTmaAsync, PipelineTmaAsync]:
        """Initialises all barriers; nobody may use them before the cluster has met."""
        cfg = self.config
        if const_expr(cfg.has_cluster_norm):
            if tidx == 0:
                for i in cutlass.range_constexpr(2 * CONSUMER_WARPGROUPS):
                    cute.arch.mbarrier_init(storage.row_sums.barriers + i, 1)
        halo_pipeline = self.make_pipeline(cfg.halo_pipeline, storage.halo_barriers, (1, 0))
        weight_pipeline = self.make_pipeline(cfg.weight_pipeline, storage.weight_barriers, (0, 1))
        return halo_pipeline, weight_pipeline

    @cute.jit
    def make_pipeline(
        self, facts: PipelineFacts, barriers: cute.Pointer, mcast_mode_mn: tuple[int, int]
    ) -> PipelineTmaAsync:
        """One ring; ``mcast_mode_mn`` names the cluster's axis along which its loads are shared."""
        tile = self.config.tile
        return PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=facts.num_stages,
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, facts.empty_arrivals),
            tx_count=facts.full_bytes,
            cta_layout_vmnk=cute.make_layout((1, tile.cluster_m, tile.cluster_n, 1)),
            mcast_mode_mn=mcast_mode_mn,
            defer_sync=True,
        )

    @cute.jit
    def stage_vectors(self, vectors: ChannelVectors, sVec: cute.Tensor | None, tidx: Int32):
        """Copies the per-channel vectors to shared memory.

        Read from global memory, their addresses would be hoisted out of the loop, into registers
        that the accumulators need.
        """
        columns = (vectors.mBias, vectors.mGamma, vectors.mResidualBias)
        for column in cutlass.range_constexpr(3):
            if const_expr(columns[column] is not None):
                gVec = cute.recast_tensor(columns[column], Int32)
                sPairs = cute.recast_tensor(sVec[None, column], Int32)
                if tidx < self.config.out_channels // 2:
                    sPairs[tidx] = gVec[tidx]


def fake_operands(config: Conv3dKernelConfig) -> tuple:
    """Fake tensors in ``__call__`` order, without the stream; N, T, H and W are dynamic."""
    ci, co = config.in_channels, config.out_channels
    n, frames, height, width = (cute.sym_int() for _ in range(4))

    def contiguous(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(BFloat16, shape, stride_order=order, assumed_align=16)

    def dynamic(channels):
        return contiguous(n, cute.sym_int(), cute.sym_int(), cute.sym_int(), channels)

    def vector(is_present):
        return contiguous(co) if is_present else None

    valid = (n, frames, height, width, co)
    is_padded = config.epilogue == NORM_PAD
    return (
        dynamic(ci),
        contiguous(co, 3, 3, 3, config.packed_channels),
        vector(not config.is_raw),
        vector(config.is_norm),
        contiguous(*valid) if config.has_residual else None,
        vector(config.has_residual_bias),
        dynamic(co) if config.has_borders else contiguous(*valid),
        contiguous(*valid) if config.is_norm and config.has_residual else None,
        contiguous(n, cute.sym_int(), height, width, co) if is_padded else None,
    )
