# SPDX-License-Identifier: Apache-2.0
"""Mainloop of the Hopper SDPA kernel: the warp that loads and the warpgroups that multiply.

All blocks of all tiles of a CTA are one stream. A *turn* of a warpgroup issues the scores of the
next block, then the product of this block's probabilities and values; the softmax of the next block
runs under its own product and under the other warpgroup's turn. At the end of a tile the next block
is the first of the next tile, so that nothing drains, and the epilogue runs under the other
warpgroup's turn too. The order of blocks is from the last to the first: masks come first.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import PipelineState, PipelineTmaAsync

from cudnn_blocks.stages.attention.hopper_config import (
    CONSUMER_THREADS,
    CONSUMER_WARPGROUPS,
    TILE_M,
    VEC,
    WARPGROUP_THREADS,
    Panel,
    SdpaConfig,
)
from cudnn_blocks.stages.attention.hopper_epilogue import EpilogueRole, Thread
from cudnn_blocks.stages.attention.hopper_operands import (
    Pipelines,
    Stages,
    TiledMmas,
    TmaOperands,
    box,
    box_layout,
)
from cudnn_blocks.stages.attention.hopper_schedule import KeyRange, QueryTile, TileSchedule
from cudnn_blocks.stages.attention.hopper_softmax import Softmax, copied
from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.device.tma import TmaOperand

MAX_THREAD = 511  # all bits of a thread's number


class NamedBarrier(IntEnum):
    """Hardware barriers; 0 is the CTA's. Each has one more for the second warpgroup."""

    TURN = 1
    """A warpgroup waits for its turn at the tensor cores; the other one hands it over."""
    CLEARED = 3
    """All threads of a warpgroup have cleared their part of a block."""


@cute.jit
def ring(cfg: SdpaConfig, use: Int32, flip: cutlass.Constexpr[int]) -> PipelineState:
    """State of the ``use``-th use of a ring of blocks; ``flip`` is 1 for the producer."""
    stages = cfg.tile.num_stages
    lap = use // stages
    if const_expr(stages & (stages - 1) == 0):
        lap = use >> (stages.bit_length() - 1)
    index = cute.arch.make_warp_uniform(use - lap * stages)  # keeps descriptors uniform
    return PipelineState(stages, Int32(0), index, (lap & 1) ^ flip)


@dataclass(frozen=True)
class LoadRole:
    """The load warp: fills stages in the order in which the consumers empty them."""

    config: SdpaConfig
    tma: TmaOperands
    stages: Stages
    pipelines: Pipelines
    schedule: TileSchedule

    @cute.jit
    def run(self):
        """Per tile, the last block of K, Q, then K and V by turns."""
        cfg, schedule = self.config, self.schedule
        tma, stages, num_stages = self.tma, self.stages, cfg.tile.num_stages
        tQsQ, tQgQ = self.partition(tma.query, stages.sQ, cfg.query_panel, CONSUMER_WARPGROUPS)
        tKsK, tKgK = self.partition(tma.key, stages.sK, cfg.key_panel, num_stages)
        tVsV, tVgV = self.partition(tma.value, stages.sV, cfg.value_panel, num_stages)
        place, iteration, use = schedule.place(Int32(0)), Int32(0), Int32(0)
        while schedule.has_tile(place):
            tile = schedule.tile(place)
            keys = schedule.keys(tile)
            head = tile.head // cfg.gqa_ratio
            block = keys.last - 1
            tKgK_head = tKgK[None, None, head, tile.batch]
            tVgV_head = tVgV[None, None, head, tile.batch]
            self.load_key(tKgK_head[None, block], tKsK, use)
            for w in cutlass.range_constexpr(CONSUMER_WARPGROUPS):
                gQ = tQgQ[None, tile.row_tile * CONSUMER_WARPGROUPS + w, tile.head, tile.batch]
                self.load_query(gQ, tQsQ, w, iteration)
            for j in cutlass.range(1, keys.num_blocks, unroll=1):
                self.load_key(tKgK_head[None, block - j], tKsK, use + j)
                self.load_value(tVgV_head[None, block - j + 1], tVsV, use + j - 1)
            iteration += 1
            place = schedule.place(iteration)
            if const_expr(cfg.tile.prefetches_query):
                if schedule.has_tile(place):
                    self.prefetch_query(tQgQ, schedule.tile(place))
            use += keys.num_blocks
            self.load_value(tVgV_head[None, keys.first], tVsV, use - 1)

    @cute.jit
    def partition(
        self,
        tma: TmaOperand,
        sX: cute.Tensor,
        panel: cutlass.Constexpr[Panel],
        num_stages: cutlass.Constexpr[int],
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """(BOX, STAGE) of shared memory; (BOX, BLOCK, H, B) of global memory."""
        block = (0, None, 0) if panel.advances_rows else (0, 0, None)
        gX = cute.local_tile(tma.tensor, box(panel), (*block, None, None))
        sX = cute.make_tensor(sX.iterator, box_layout(panel, num_stages))
        return cpasync.tma_partition(
            tma.atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 5), cute.group_modes(gX, 0, 5)
        )

    @cute.jit
    def load_query(
        self, gQ: cute.Tensor, tQsQ: cute.Tensor, w: cutlass.Constexpr[int], iteration: Int32
    ):
        """64 rows for one warpgroup."""
        pipeline = self.pipelines.query
        state = PipelineState(CONSUMER_WARPGROUPS, Int32(0), Int32(w), (iteration & 1) ^ 1)
        pipeline.producer_acquire(state)
        full = pipeline.producer_get_barrier(state)
        cute.copy(self.tma.query.atom, gQ, tQsQ[None, w], tma_bar_ptr=full)

    @cute.jit
    def prefetch_query(self, tQgQ: cute.Tensor, tile: QueryTile):
        """The rows of a tile into L2."""
        for w in cutlass.range_constexpr(CONSUMER_WARPGROUPS):
            row = tile.row_tile * CONSUMER_WARPGROUPS + w
            cute.prefetch(self.tma.query.atom, tQgQ[None, row, tile.head, tile.batch])

    @cute.jit
    def load_key(self, gK: cute.Tensor, tKsK: cute.Tensor, use: Int32):
        """A block; the first CTA of a cluster loads it for all."""
        self.load_block(self.tma.key, self.pipelines.key, gK, tKsK, use, 0)

    @cute.jit
    def load_value(self, gV: cute.Tensor, tVsV: cute.Tensor, use: Int32):
        """A block; the last CTA of a cluster loads it for all."""
        rank = self.config.cluster - 1
        self.load_block(self.tma.value, self.pipelines.value, gV, tVsV, use, rank)

    @cute.jit
    def load_block(
        self,
        tma: TmaOperand,
        pipeline: PipelineTmaAsync,
        gX: cute.Tensor,
        tXsX: cute.Tensor,
        use: Int32,
        rank: cutlass.Constexpr[int],
    ):
        """Every CTA of the cluster expects the block, CTA ``rank`` sends it to all."""
        cfg = self.config
        state = ring(cfg, use, 1)
        pipeline.producer_acquire(state)
        full = pipeline.producer_get_barrier(state)
        if const_expr(cfg.cluster > 1):
            mask = Int16((1 << cfg.cluster) - 1)
            if self.schedule.cta_rank == rank:
                cute.copy(tma.atom, gX, tXsX[None, state.index], tma_bar_ptr=full, mcast_mask=mask)
        else:
            cute.copy(tma.atom, gX, tXsX[None, state.index], tma_bar_ptr=full)


@dataclass(frozen=True)
class MmaRole:
    """A consumer warpgroup: 64 rows of every tile."""

    config: SdpaConfig
    mmas: TiledMmas
    stages: Stages
    pipelines: Pipelines
    schedule: TileSchedule
    thread: Thread
    softmax: Softmax
    epilogue: EpilogueRole
    tSrQ: cute.Tensor
    """(MMA, MMA_M, MMA_K, WARPGROUP)"""
    tSrK: cute.Tensor
    """(MMA, MMA_N, MMA_K, STAGE)"""
    tOrP: cute.Tensor
    """(MMA, MMA_M, MMA_K), in registers."""
    tOrV: cute.Tensor
    """(MMA, MMA_N, MMA_K, STAGE)"""
    tOrO: cute.Tensor
    """(MMA, MMA_M, MMA_N)"""
    spare: Int32
    """Address of shared memory that nothing reads."""

    @cute.jit
    def run(self):
        """All tiles of the CTA."""
        cfg, schedule, softmax, epilogue = self.config, self.schedule, self.softmax, self.epilogue
        pipelines, thread, tOrO = self.pipelines, self.thread, self.tOrO
        tOrO.fill(0.0)
        softmax.reset()
        if thread.warpgroup == 1:
            cute.arch.barrier_arrive(
                barrier_id=NamedBarrier.TURN, number_of_threads=CONSUMER_THREADS
            )
        place, iteration, use = schedule.place(Int32(0)), Int32(0), Int32(0)
        first_tile = schedule.tile(place)
        first_keys = schedule.keys(first_tile)
        row_tile = first_tile.row_tile
        first, last, length = first_keys.first, first_keys.last, first_keys.length
        self.first_scores(row_tile, first_keys)
        while schedule.has_tile(place):
            num_blocks = last - first
            row = row_tile * TILE_M + thread.row
            bounds = self.step_bounds(row_tile, KeyRange(first, last, length))
            for part in cutlass.range_constexpr(cfg.num_parts):
                for j in cutlass.range(bounds[part], bounds[part + 1], unroll=1):
                    pipelines.key.consumer_wait(ring(cfg, use + j, 0))
                    self.turn(use + j)
                    pipelines.key.consumer_release(ring(cfg, use + j, 0))
                    if j == num_blocks - 1:
                        pipelines.query.consumer_release(self.query_state(iteration))
                    if const_expr(part != 1):
                        softmax.mask(schedule, last - 1 - j, row, length, thread.quad_lane)
                    self.weigh()
                    self.finish_turn(use + j)
                    softmax.rescale(tOrO)
            # The first scores of the next tile go with the last product of this one. Past the last
            # tile they are of stale blocks and nobody looks at them: wgmma in a branch costs more.
            use += num_blocks
            iteration += 1
            next_place = schedule.place(iteration)
            has_next = schedule.has_tile(next_place)
            next_tile = schedule.tile(cutlass.min(next_place, schedule.extents.num_tiles - 1))
            next_keys = schedule.keys(next_tile)
            next_row = next_tile.row_tile * TILE_M + thread.row
            # Decoded again: head and batch must not occupy uniform registers in the loops above.
            done_tile = schedule.tile(cute.arch.make_warp_uniform(place))
            done_row = done_tile.row_tile * TILE_M
            if const_expr(cfg.has_gate):
                place_of = thread
                if const_expr(cfg.is_short_of_registers):  # computed anew rather than kept
                    place_of = Thread(copied(thread.tidx) & MAX_THREAD, thread.warpgroup)
                epilogue.prefetch_gate(done_tile, done_row + place_of.warp_row)
            if has_next:
                pipelines.query.consumer_wait(self.query_state(iteration))
                pipelines.key.consumer_wait(ring(cfg, use, 0))
            self.turn(use)
            if has_next:
                pipelines.key.consumer_release(ring(cfg, use, 0))
                if next_keys.num_blocks == 1:
                    pipelines.query.consumer_release(self.query_state(iteration))
            rSum, rMax = softmax.take()
            if const_expr(not cfg.is_short_of_registers):
                gate = epilogue.start_gate(done_tile, done_row + thread.row)
            if has_next:
                block = next_keys.last - 1
                softmax.mask(schedule, block, next_row, next_keys.length, thread.quad_lane)
                self.weigh()
            if const_expr(cfg.is_short_of_registers):
                gate = epilogue.start_gate(done_tile, done_row + thread.row)
            self.finish_turn(use)
            epilogue.store(tOrO, rSum, rMax, gate, done_tile, done_row + thread.row)
            tOrO.fill(0.0)
            if const_expr(cfg.clears_tail):
                if has_next:
                    self.clear_tail(use, next_keys)
            place, row_tile = next_place, next_tile.row_tile
            first, last, length = next_keys.first, next_keys.last, next_keys.length

    @cute.jit
    def step_bounds(self, row_tile: Int32, keys: KeyRange) -> tuple[Int32, ...]:
        """Ends of the masked, the unmasked, and with a left window again masked steps."""
        right, left = self.schedule.masked_steps(row_tile, keys, self.thread.warpgroup)
        right = cute.arch.make_warp_uniform(right)
        if const_expr(self.config.has_window_left):
            left = cute.arch.make_warp_uniform(left)
        return (Int32(1), right, left, keys.num_blocks)

    @cute.jit
    def first_scores(self, row_tile: Int32, keys: KeyRange):
        """Scores and probabilities of the first block of the stream."""
        cfg, schedule, softmax, thread = self.config, self.schedule, self.softmax, self.thread
        pipelines, start = self.pipelines, ring(self.config, Int32(0), 0)
        pipelines.query.consumer_wait(self.query_state(Int32(0)))
        pipelines.key.consumer_wait(start)
        self.take_tensor_cores()
        self.multiply_scores(start.index)
        self.pass_tensor_cores()
        warpgroup.wait_group(0)
        pipelines.key.consumer_release(start)
        if keys.num_blocks == 1:
            pipelines.query.consumer_release(self.query_state(Int32(0)))
        row = row_tile * TILE_M + thread.row
        softmax.mask(schedule, keys.last - 1, row, keys.length, thread.quad_lane)
        self.weigh()
        softmax.store_probabilities(self.tOrP)
        if const_expr(cfg.clears_tail):
            self.clear_tail(Int32(0), keys)

    @cute.jit
    def turn(self, use: Int32):
        """Scores of block ``use``, which end here, and the product of the block before it."""
        before = ring(self.config, use - 1, 0)
        scores = ring(self.config, use, 0)
        self.take_tensor_cores()
        self.multiply_scores(scores.index)
        self.pipelines.value.consumer_wait(before)
        self.multiply_output(before.index)
        self.pass_tensor_cores()
        warpgroup.wait_group(1)

    @cute.jit
    def weigh(self):
        """Softmax of the scores, under the product of the block before them."""
        self.softmax.step()
        if const_expr(self.config.tile.pins_exponentials):
            self.softmax.pin(self.spare)
        if const_expr(self.config.is_fp8):
            self.softmax.round_to_codes()

    @cute.jit
    def finish_turn(self, use: Int32):
        """Waits for the product of the block before ``use``; rounds the probabilities of that."""
        warpgroup.wait_group(0)
        self.pipelines.value.consumer_release(ring(self.config, use - 1, 0))
        self.softmax.store_probabilities(self.tOrP)

    @cute.jit
    def multiply_scores(self, stage: Int32):
        """One commit group. Cut to the stage first: descriptors then take few uniform registers."""
        atom = cute.make_mma_atom(self.mmas.scores.op)
        tSrQ = self.tSrQ[None, None, None, self.thread.warpgroup]
        tSrK = self.tSrK[None, None, None, stage]
        tSrS = self.softmax.rS
        atom.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for k in cutlass.range_constexpr(self.config.d_head // self.config.mma_k):
            cute.gemm(atom, tSrS, tSrQ[None, None, k], tSrK[None, None, k], tSrS)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def multiply_output(self, stage: Int32):
        """One commit group."""
        atom = cute.make_mma_atom(self.mmas.output.op)
        tOrP, tOrV = self.tOrP, self.tOrV[None, None, None, stage]
        atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for k in cutlass.range_constexpr(self.config.tile.n // self.config.mma_k):
            rP = tOrP[None, None, k]
            cute.gemm(atom, self.tOrO, rP, tOrV[None, None, k], self.tOrO)
        warpgroup.commit_group()

    @cute.jit
    def clear_tail(self, use: Int32, keys: KeyRange):
        """Zeros over what lies past the sequence in the last block of V, the ``use``-th.

        Probabilities are 0 there, but memory may hold NaN. Both warpgroups write the same zeros,
        each before its own product.
        """
        cfg = self.config
        n = cfg.tile.n
        start = cutlass.max(keys.length - (keys.last - 1) * n, 0)
        if start < n:
            stage = ring(cfg, use, 0)
            self.pipelines.value.consumer_wait(stage)
            plain = cute.recast_ptr(self.stages.sV.iterator, dtype=DTYPES[cfg.dtype])
            row_vecs, chunks = cfg.value_panel.chunk // VEC, cfg.value_panel.chunks
            stride = (1, VEC, n * cfg.value_panel.chunk)
            rows = cute.make_layout((VEC, n * row_vecs, chunks), stride=stride)
            sRows = cute.make_tensor(plain + stage.index * (n * cfg.d_head), rows)
            rZero = cute.make_rmem_tensor((VEC,), DTYPES[cfg.dtype])
            rZero.fill(0.0)
            thread = self.thread.tidx % WARPGROUP_THREADS
            begin, end = start * row_vecs + thread, n * row_vecs
            for i in cutlass.range(begin, end, WARPGROUP_THREADS, unroll=1):
                for c in cutlass.range_constexpr(chunks):
                    cute.autovec_copy(rZero, sRows[None, i, c])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(
                barrier_id=NamedBarrier.CLEARED + self.thread.warpgroup,
                number_of_threads=WARPGROUP_THREADS,
            )

    def query_state(self, iteration: Int32) -> PipelineState:
        """The warpgroup's stage of Q in a tile."""
        return PipelineState(CONSUMER_WARPGROUPS, Int32(0), self.thread.warpgroup, iteration & 1)

    @cute.jit
    def take_tensor_cores(self):
        """Waits until the other warpgroup has issued its turn."""
        cute.arch.barrier(
            barrier_id=NamedBarrier.TURN + self.thread.warpgroup,
            number_of_threads=CONSUMER_THREADS,
        )

    @cute.jit
    def pass_tensor_cores(self):
        """It is the other warpgroup's turn."""
        cute.arch.barrier_arrive(
            barrier_id=NamedBarrier.TURN + 1 - self.thread.warpgroup,
            number_of_threads=CONSUMER_THREADS,
        )
