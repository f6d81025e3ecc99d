# SPDX-License-Identifier: Apache-2.0
"""Causal convolution 12 -> 160 on packed 16-channel pixels as an implicit GEMM (sm_90a).

    output[n, t, h, w] = B(sum over 27 taps and 16 channels of
                           padded_input[n, t + kt, h + kr, w + ks] * weight[kt, kr, ks])

with FP32 accumulation in the order of taps, whatever the tile is. Channels 12 to 15 are zero on
both sides.

Grid:           persistent, one CTA per SM; CTA i takes tiles i, i + grid, ... of ``width x height``
                output pixels and all 160 channels. W is fastest, then H, T, N.
Warp roles:     load (1 warp of the last warpgroup), multiply and store (2 warpgroups, a whole tile
                each, in turns: while one multiplies the other stores).
Shared memory:  the 27 taps of the weight, resident, 135 KiB; ``num_stages`` halo stages, each one
                tile's three input frames with their halo. A pixel is one 32-byte swizzled row that
                the taps read at shifted addresses: an m64 block is 8 x 8 pixels, so that its 8-row
                groups lie one halo row apart.
Pipelines:      halo: load -> multiply. full: TMA bytes; empty: 1 arrive per warp of the one
                warpgroup that reads it.
                weight: one barrier, all 27 taps, once.
                turns: two named barriers of 256 threads; a warpgroup waits on its own and, when its
                wgmma are issued, arrives on the other's.
Zero frames:    planes that read nothing but leading frames known to be zero are not multiplied. The
                sum of the others starts from the same zero, so the bits are those of the full sum.
Overlap:        with PDL the next grid may start at once; global memory is touched after the wait.
Requires:       operands contiguous and 16-byte aligned.
Source:         written for this project; behaviour after the causal convolution of cudnn-frontend.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_compact_tensor
from cutlass.memory import SmemAllocator
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    PipelineState,
    PipelineTmaAsync,
    PipelineUserType,
    make_pipeline_state,
)

from cudnn_blocks.stages.conv3d_input.hopper_config import (
    BLOCK_PIXELS,
    BLOCK_SIDE,
    CHANNELS,
    CONSUMER_REGISTERS,
    CONSUMER_WARPGROUPS,
    ELEMENT_BYTES,
    GROUPS,
    LOAD_WARP,
    NUM_THREADS,
    OUT_CHANNELS,
    PACKED_COLUMNS,
    PLANES,
    PRODUCER_REGISTERS,
    SMEM_ALIGN_BYTES,
    TAP_BYTES,
    TAPS,
    TAPS_PER_PLANE,
    TURN_THREADS,
    VEC,
    WARP_THREADS,
    WARPGROUP_THREADS,
    WARPGROUP_WARPS,
    WEIGHT_BOX,
    CausalConvConfig,
)
from cudnn_blocks.stages.device.tma import TmaOperand, channels_first, partition_box


class NamedBarrierCausalConv(IntEnum):
    """Whose turn it is to issue wgmma; barrier 0 is the CTA's."""

    FIRST = 1
    SECOND = 2


@dataclass(frozen=True)
class OutputTile:
    """Where a tile starts."""

    n: Int32
    t: Int32
    h: Int32
    w: Int32


@dataclass(frozen=True)
class TileSchedule:
    """Extents of one launch: fast divisors, and the number of tiles.

    The config stays outside: what a kernel takes as an argument is no compile-time constant in it.
    """

    tiles_w: cute.FastDivmodDivisorV2
    tiles_h: cute.FastDivmodDivisorV2
    frames: cute.FastDivmodDivisorV2
    num_tiles: Int32

    @classmethod
    def of_output(cls, cfg: CausalConvConfig, mO: cute.Tensor) -> "TileSchedule":
        """The schedule for ``[N, T, H, W, 160]``."""
        n, t, h, w, _ = mO.shape
        tiles_w, tiles_h = (w - 1) // cfg.tile.width + 1, (h - 1) // cfg.tile.height + 1
        divisor = cute.fast_divmod_create_divisor_v2
        return cls(divisor(tiles_w), divisor(tiles_h), divisor(t), n * t * tiles_h * tiles_w)

    @cute.jit
    def tile(self, cfg: cutlass.Constexpr[CausalConvConfig], index: Int32) -> OutputTile:
        """Where the tile with this number starts."""
        row, w = divmod(index, self.tiles_w)
        plane, h = divmod(row, self.tiles_h)
        n, t = divmod(plane, self.frames)
        return OutputTile(n, t, h * cfg.tile.height, w * cfg.tile.width)


@dataclass(frozen=True)
class SharedStorage:
    """Shared memory of one CTA.

    TMA fills ``sX (C, W, H, T, N, STAGE)`` and ``sW (C, E, Q, J, G, TAP)``; wgmma reads the same
    bytes as ``sA (M, K, PLANE, R, S, STAGE)``, the pixels once per tap, and ``sB (N, K, TAP)``.
    """

    sX: cute.Tensor
    sA: cute.Tensor
    sW: cute.Tensor
    sB: cute.Tensor
    halo_barriers: cute.Pointer
    weight_barrier: cute.Pointer


class CausalConvKernel:
    """The convolution behind the packing; see the module docstring."""

    def __init__(self, config: CausalConvConfig):
        self.config = config

    @cute.jit
    def __call__(
        self, padded_input: cute.Tensor, packed_weight: cute.Tensor, output: cute.Tensor, stream
    ):
        cfg = self.config
        schedule = TileSchedule.of_output(cfg, output)
        self.kernel(
            self.halo_operand(padded_input),
            self.weight_operand(packed_weight),
            self.make_tiled_mma(),
            output,
            schedule,
        ).launch(
            grid=(cutlass.min(schedule.num_tiles, cfg.num_ctas), 1, 1),
            block=(NUM_THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def halo_operand(self, mX: cute.Tensor) -> TmaOperand:
        """Boxes of three frames of input pixels."""
        cfg = self.config
        sX = cute.make_composed_layout(
            self.swizzle(), 0, cute.select(self.halo_layout(), mode=[0, 1, 2, 3, 4])
        )
        op = cpasync.CopyBulkTensorTileG2SOp()
        return TmaOperand(*cpasync.make_tiled_tma_atom(op, channels_first(mX), sX, cfg.halo_box))

    def weight_operand(self, mW: cute.Tensor) -> TmaOperand:
        """One tap; (K, E, Q, J, G) as ``WEIGHT_BOX`` orders the filters."""
        k = PACKED_COLUMNS
        layout = cute.make_layout((k, 2, 4, 4, GROUPS), stride=(1, k, 8 * k, 2 * k, 32 * k))
        sW = cute.make_composed_layout(
            self.swizzle(), 0, cute.select(self.weight_layout(), mode=[0, 1, 2, 3, 4])
        )
        op = cpasync.CopyBulkTensorTileG2SOp()
        return TmaOperand(
            *cpasync.make_tiled_tma_atom(op, cute.make_tensor(mW.iterator, layout), sW, WEIGHT_BOX)
        )

    def make_tiled_mma(self) -> cute.TiledMma:
        """One warpgroup, m64 blocks of all output channels."""
        op = warpgroup.MmaF16BF16Op(
            BFloat16,
            Float32,
            (BLOCK_PIXELS, OUT_CHANNELS, CHANNELS),
            warpgroup.OperandSource.SMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1))

    @cute.kernel
    def kernel(
        self,
        halo_tma: TmaOperand,
        weight_tma: TmaOperand,
        tiled_mma: cute.TiledMma,
        mO: cute.Tensor,
        schedule: TileSchedule,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup_idx = cute.arch.make_warp_uniform(tidx // WARPGROUP_THREADS)
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(halo_tma.atom)
            cpasync.prefetch_descriptor(weight_tma.atom)
        storage = self.allocate()
        pipeline = self.make_pipeline(storage, tidx)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        if warpgroup_idx == CONSUMER_WARPGROUPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == LOAD_WARP:
                self.load_weight(weight_tma, storage)
                self.load_halos(halo_tma, storage.sX, pipeline, schedule)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(tiled_mma, storage, pipeline, mO, schedule, tidx, warpgroup_idx)

    # The load warp.

    @cute.jit
    def load_weight(self, tma: TmaOperand, storage: SharedStorage):
        """All taps, for the life of the CTA."""
        gW = cute.local_tile(tma.tensor, WEIGHT_BOX, (None, 0, 0, 0, 0))
        tWsW, tWgW = cpasync.tma_partition(
            tma.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(storage.sW, 0, 5),
            cute.group_modes(gW, 0, 5),
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(storage.weight_barrier, TAPS * TAP_BYTES)
        for tap in cutlass.range(TAPS, unroll=1):
            cute.copy(
                tma.atom, tWgW[None, tap], tWsW[None, tap], tma_bar_ptr=storage.weight_barrier
            )

    @cute.jit
    def load_halos(
        self, tma: TmaOperand, sX: cute.Tensor, pipeline: PipelineTmaAsync, schedule: TileSchedule
    ):
        """One stage per tile of this CTA, in order."""
        bidx, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        stage = make_pipeline_state(PipelineUserType.Producer, self.config.num_stages)
        for index in cutlass.range(bidx, schedule.num_tiles, num_ctas, unroll=1):
            tile = schedule.tile(self.config, index)
            pipeline.producer_acquire(stage)
            tXsX, tXgX = partition_box(
                tma, self.config.halo_box, (0, tile.w, tile.h, tile.t, tile.n), sX
            )
            cute.copy(
                tma.atom,
                tXgX,
                tXsX[None, stage.index],
                tma_bar_ptr=pipeline.producer_get_barrier(stage),
            )
            stage.advance()
        pipeline.producer_tail(stage)

    # The consumer warpgroups.

    @cute.jit
    def consume(
        self,
        tiled_mma: cute.TiledMma,
        storage: SharedStorage,
        pipeline: PipelineTmaAsync,
        mO: cute.Tensor,
        schedule: TileSchedule,
        tidx: Int32,
        warpgroup_idx: Int32,
    ):
        """Every second tile of the CTA, and its stage."""
        cfg = self.config
        bidx, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        thr_mma = tiled_mma.get_slice(0)
        tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(storage.sA))
        tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(storage.sB))
        tCrC = cute.make_rmem_tensor(
            tiled_mma.partition_shape_C((cfg.tile.width * cfg.tile.height, OUT_CHANNELS)), Float32
        )
        own_turn = NamedBarrierCausalConv.FIRST + warpgroup_idx
        other_turn = NamedBarrierCausalConv.SECOND - warpgroup_idx
        stage = PipelineState(cfg.num_stages, Int32(0), warpgroup_idx, Int32(0))
        if warpgroup_idx == 1:
            self.pass_turn(other_turn)
        cute.arch.mbarrier_wait(storage.weight_barrier, 0)
        first = bidx + num_ctas * warpgroup_idx
        for index in cutlass.range(
            first, schedule.num_tiles, num_ctas * CONSUMER_WARPGROUPS, unroll=1
        ):
            tile = schedule.tile(self.config, index)
            pipeline.consumer_wait(stage)
            cute.arch.barrier(barrier_id=own_turn, number_of_threads=TURN_THREADS)
            self.multiply(tiled_mma, tCrA, tCrB, tCrC, stage.index, self.first_plane(tile))
            self.pass_turn(other_turn)
            warpgroup.wait_group(0)
            pipeline.consumer_release(stage)
            self.store(tCrC, mO, tile, tidx)
            for _ in cutlass.range_constexpr(CONSUMER_WARPGROUPS):
                stage.advance()

    @cute.jit
    def first_plane(self, tile: OutputTile) -> Int32:
        """First filter plane that reads a frame not known to be zero; the last one always does."""
        return cutlass.max(self.config.zero_leading_frames - tile.t, 0)

    @cute.jit
    def pass_turn(self, turn: Int32):
        cute.arch.barrier_arrive(barrier_id=turn, number_of_threads=TURN_THREADS)

    @cute.jit
    def multiply(
        self,
        tiled_mma: cute.TiledMma,
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        tCrC: cute.Tensor,
        stage: Int32,
        first_plane: Int32,
    ):
        """Issues a tile's wgmma as one group, a K block per tap.

        The DSL carries the accumulate flag through a loop only where the loop's own body sets it.
        """
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        if const_expr(self.config.zero_leading_frames == 0):
            for tap in cutlass.range_constexpr(TAPS):
                tCrA_tap = self.pixels_of_tap(
                    tCrA, stage, tap // TAPS_PER_PLANE, tap % TAPS_PER_PLANE
                )
                cute.gemm(tiled_mma, tCrC, tCrA_tap, tCrB[None, None, 0, tap], tCrC)
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        else:
            for plane in cutlass.range(first_plane, PLANES, unroll=1):
                for tap in cutlass.range_constexpr(TAPS_PER_PLANE):
                    tCrA_tap = self.pixels_of_tap(tCrA, stage, plane, tap)
                    tCrB_tap = tCrB[None, None, 0, plane * TAPS_PER_PLANE + tap]
                    cute.gemm(tiled_mma, tCrC, tCrA_tap, tCrB_tap, tCrC)
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def pixels_of_tap(self, tCrA: cute.Tensor, stage: Int32, plane, tap: int) -> cute.Tensor:
        return tCrA[None, None, 0, plane, tap // 3, tap % 3, stage]

    @cute.jit
    def store(self, tCrC: cute.Tensor, mO: cute.Tensor, tile: OutputTile, tidx: Int32):
        """``B(acc)``, 16 bytes a store; quad lane q holds channels ``32 g + 8 q .. + 7``."""
        cfg = self.config
        layout = cute.make_layout(
            ((2, 4), GROUPS, 2, cfg.blocks), stride=((1, 4), 16, 2, OUT_CHANNELS // 2)
        )
        rAcc = cute.make_tensor(tCrC.iterator, layout)  # (VEC, G, ROW, BLOCK)
        column, quad_lane = tidx % WARP_THREADS // 4, tidx % 4
        warp = tidx % WARPGROUP_THREADS // WARP_THREADS
        for block in cutlass.range_constexpr(cfg.blocks):
            for r in cutlass.range_constexpr(2):
                w = tile.w + block % cfg.blocks_per_row * BLOCK_SIDE + column
                h = tile.h + block // cfg.blocks_per_row * BLOCK_SIDE + warp * 2 + r
                offset = cute.crd2idx((tile.n, tile.t, h, w, quad_lane * VEC), mO.layout)
                gO = cute.make_tensor(
                    mO.iterator + cute.assume(offset, divby=VEC),
                    cute.make_layout((VEC, GROUPS), stride=(1, 32)),
                )
                rO = cute.make_rmem_tensor((VEC, GROUPS), BFloat16)
                for g in cutlass.range_constexpr(GROUPS):
                    rVec = cute.make_rmem_tensor(VEC, Float32)
                    for i in cutlass.range_constexpr(VEC):
                        rVec[i] = rAcc[i, g, r, block]
                    rO[None, g].store(rVec.load().to(BFloat16))
                if (w < mO.shape[3]) & (h < mO.shape[2]):
                    for g in cutlass.range_constexpr(GROUPS):
                        cute.autovec_copy(rO[None, g], gO[None, g])

    # Shared memory.

    def swizzle(self) -> cute.Swizzle:
        """32-byte swizzle, of pixels and filters."""
        return warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW32, BFloat16).inner

    def halo_layout(self) -> cute.Layout:
        """(C, W, H, T, N, STAGE)."""
        cfg = self.config
        c, w, h, _, _ = cfg.halo_box
        return cute.make_layout(
            (*cfg.halo_box, cfg.num_stages),
            stride=(1, c, c * w, c * w * h, 0, cfg.stage_bytes // ELEMENT_BYTES),
        )

    def halo_mma_layout(self) -> cute.Layout:
        """(M, K, PLANE, R, S, STAGE): M is ((w, h) in a block, blocks)."""
        cfg = self.config
        c, w, h, _, _ = cfg.halo_box
        rows = ((BLOCK_SIDE, BLOCK_SIDE), cfg.blocks_per_row, cfg.tile.height // BLOCK_SIDE)
        row_strides = ((c, c * w), BLOCK_SIDE * c, BLOCK_SIDE * c * w)
        return cute.make_layout(
            (rows, c, PLANES, 3, 3, cfg.num_stages),
            stride=(row_strides, 1, c * w * h, c * w, c, cfg.stage_bytes // ELEMENT_BYTES),
        )

    def weight_layout(self) -> cute.Layout:
        """(C, E, Q, J, G, TAP): row ``32 G + 8 J + 2 Q + E`` is filter ``32 G + 8 Q + 2 J + E``."""
        c = CHANNELS
        return cute.make_layout(
            (*WEIGHT_BOX, TAPS), stride=(1, c, 2 * c, 8 * c, 32 * c, OUT_CHANNELS * c)
        )

    def weight_mma_layout(self) -> cute.Layout:
        """(N, K, TAP)."""
        return cute.make_layout(
            (OUT_CHANNELS, CHANNELS, TAPS), stride=(CHANNELS, 1, OUT_CHANNELS * CHANNELS)
        )

    def allocate(self) -> SharedStorage:
        """Shared memory in the order of :func:`smem_bytes`."""
        smem = SmemAllocator()

        def ring(layout: cute.Layout) -> cute.Tensor:
            return smem.allocate_tensor(
                BFloat16, layout, byte_alignment=SMEM_ALIGN_BYTES, swizzle=self.swizzle()
            )

        sW, sX = ring(self.weight_layout()), ring(self.halo_layout())
        return SharedStorage(
            sX=sX,
            sA=cute.make_tensor(sX.iterator, self.halo_mma_layout()),
            sW=sW,
            sB=cute.make_tensor(sW.iterator, self.weight_mma_layout()),
            halo_barriers=smem.allocate_array(Int64, 2 * self.config.num_stages),
            weight_barrier=smem.allocate_array(Int64, 1),
        )

    @cute.jit
    def make_pipeline(self, storage: SharedStorage, tidx: Int32) -> PipelineTmaAsync:
        """Initialises all barriers; nobody may use them before the CTA has met."""
        if tidx == 0:
            cute.arch.mbarrier_init(storage.weight_barrier, 1)
        return PipelineTmaAsync.create(
            barrier_storage=storage.halo_barriers,
            num_stages=self.config.num_stages,
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, WARPGROUP_WARPS),
            tx_count=self.config.halo_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )


def fake_operands(config: CausalConvConfig) -> tuple:
    """Fake tensors in ``__call__`` order, without the stream; N, T, H and W are dynamic."""
    n = cute.sym_int()

    def contiguous(*shape):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(BFloat16, shape, stride_order=order, assumed_align=16)

    def activation(channels):
        return contiguous(n, cute.sym_int(), cute.sym_int(), cute.sym_int(), channels)

    return (
        activation(CHANNELS),
        contiguous(OUT_CHANNELS, PACKED_COLUMNS),
        activation(OUT_CHANNELS),
    )
