# SPDX-License-Identifier: Apache-2.0
"""Scaled dot product attention, forward, with masks, lengths and a fused gate (sm_90a).

    S   = f32(Q K')                                      keys j that row i sees, see below
    P   = exp(scale * S - reference of the row)          FP32; rounded to the activation dtype for
    O   = act(f32(P V) / f32(sum P))                     the product, summed before it is
    LSE = log(sum exp(scale * S))                        natural logarithm, FP32
    out = act(f32(O) * sigmoid(f32(gate)))               with a gate, else O

Row i sees key j if ``j < length`` and, with ``diagonal = length - S`` bottom-right, else 0, if
``j <= i + diagonal + window_right`` (causal) and ``j >= i + diagonal - window_left``. The length is
``seq_lens[b]`` within 0 and Sk, else Sk. A row that sees no key is exactly 0, its LSE -inf. Keys
and values past the length may hold anything.

Grid:           persistent, one CTA per SM; clusters take tiles of a static schedule
                (hopper_schedule).
Tile:           128 query rows of a head, ``tile.n`` keys at a time (hopper_config).
Warp roles:     warps 0-7    two consumer warpgroups of 64 rows, which take turns at the tensor
                             cores (hopper_mainloop, hopper_softmax, hopper_epilogue).
                warp 8       TMA loads of Q, K and V.
                warps 9-11   none.
Pipelines:      query        a stage per warpgroup; empty: its 4 warps.
                key, value   ``num_stages`` blocks each; empty: 8 warps x cluster CTAs.
                Every full barrier has one arrival, which expects the bytes.
Cluster:        two query heads of one key and value head, where there is an even number of them: K
                is multicast by one CTA, V by the other.
Shared memory:  query, key and value stages, barriers: ``smem_bytes``, at most 227 KiB.
Overlap:        with PDL the next grid may start at once; all memory is touched after the wait.
Requires:       last stride 1, other strides multiples of 8, 16-byte aligned operands; S and Sk at
                least 1; ``scale`` positive; fewer than 2**31 tiles.
Source:         written for this project; masks and dead rows after the gated attention block of
                cudnn-frontend. No code copied.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    PipelineTmaAsync,
    pipeline_init_arrive,
    pipeline_init_wait,
)

from cudnn_blocks.stages.attention.hopper_config import (
    CONSUMER_REGISTERS,
    CONSUMER_WARPGROUPS,
    LOAD_WARP,
    MMA_M,
    NUM_THREADS,
    PIN_BYTES,
    PRODUCER_REGISTERS,
    SMEM_ALIGN_BYTES,
    VEC,
    WARPGROUP_THREADS,
    PipelineFacts,
    SdpaConfig,
    smem_bytes,
)
from cudnn_blocks.stages.attention.hopper_epilogue import EpilogueRole, Scales, Thread
from cudnn_blocks.stages.attention.hopper_mainloop import LoadRole, MmaRole
from cudnn_blocks.stages.attention.hopper_operands import (
    Pipelines,
    Stages,
    TiledMmas,
    TmaOperands,
    make_tiled_mmas,
    swizzle_atom,
    tma_operand,
)
from cudnn_blocks.stages.attention.hopper_schedule import Extents, TileSchedule
from cudnn_blocks.stages.attention.hopper_softmax import Softmax
from cudnn_blocks.stages.device.dtypes import DTYPES

__all__ = ["SdpaConfig", "SdpaKernel", "fake_operands", "smem_bytes"]

LOG2_E = 1.4426950408889634


class SdpaKernel:
    """Attention of one set of heads; see the module docstring."""

    def __init__(self, config: SdpaConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        o: cute.Tensor,
        gate: cute.Tensor | None,
        lse: cute.Tensor | None,
        seq_lens: cute.Tensor | None,
        scale: Float32,
        stream,
    ):
        cfg = self.config
        extents = Extents.of(cfg, q, k)
        self.kernel(
            self.tma_operands(q, k, v),
            make_tiled_mmas(cfg),
            o,
            gate,
            lse,
            seq_lens,
            scale * LOG2_E,
            cfg.max_growth / (scale * LOG2_E),
            extents,
        ).launch(**self.launch_facts(extents), stream=stream)

    def tma_operands(self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor) -> TmaOperands:
        """Q, K and V, of which the CTAs of a cluster share the latter two."""
        cfg = self.config
        is_shared = cfg.cluster > 1
        return TmaOperands(
            tma_operand(cfg, q, cfg.query_panel),
            tma_operand(cfg, k, cfg.key_panel, is_shared),
            tma_operand(cfg, v, cfg.value_panel, is_shared),
        )

    def launch_facts(self, extents: Extents) -> dict:
        """Grid and attributes of the launch."""
        cluster = self.config.cluster
        return {
            "grid": (extents.num_clusters * cluster, 1, 1),
            "block": (NUM_THREADS, 1, 1),
            "cluster": (cluster, 1, 1) if cluster > 1 else None,
            "min_blocks_per_mp": 1,
            "use_pdl": True,
        }

    @cute.kernel
    def kernel(
        self,
        tma: TmaOperands,
        mmas: TiledMmas,
        mO: cute.Tensor,
        mGate: cute.Tensor | None,
        mLse: cute.Tensor | None,
        mSeqLens: cute.Tensor | None,
        scale: Float32,
        slack: Float32,
        extents: Extents,
    ):
        self.run(tma, mmas, mO, mGate, mLse, mSeqLens, Scales(scale, slack), extents)

    @cute.jit
    def run(
        self,
        tma: TmaOperands,
        mmas: TiledMmas,
        mO: cute.Tensor,
        mGate: cute.Tensor | None,
        mLse: cute.Tensor | None,
        mSeqLens: cute.Tensor | None,
        scales: Scales,
        extents: Extents,
    ):
        """The kernel, whatever it is launched with."""
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        warpgroup = cute.arch.make_warp_uniform(tidx // WARPGROUP_THREADS)
        cta_rank = Int32(0)
        if const_expr(cfg.cluster > 1):
            cta_rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        schedule = TileSchedule(cfg, extents, mSeqLens, bidx // cfg.cluster, cta_rank)
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(tma.query.atom)
            cpasync.prefetch_descriptor(tma.key.atom)
            cpasync.prefetch_descriptor(tma.value.atom)

        smem = SmemAllocator()
        stages = self.allocate_stages(smem)
        pipelines = self.make_pipelines(smem)
        spare = smem.allocate_array(Int32, PIN_BYTES // 4)
        pipeline_init_arrive(cluster_shape_mn=(cfg.cluster, 1), is_relaxed=True)
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        cute.arch.sync_threads()
        pipeline_init_wait(cluster_shape_mn=(cfg.cluster, 1))

        if warpgroup == CONSUMER_WARPGROUPS:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == LOAD_WARP:
                LoadRole(cfg, tma, stages, pipelines, schedule).run()
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            thread = Thread(tidx, warpgroup)
            epilogue = EpilogueRole(cfg, thread, extents, mO, mGate, mLse, scales)
            rS = self.make_accumulator(mmas.scores, cfg.tile.n)
            softmax = Softmax.make(cfg, scales.scores, scales.slack, rS)
            self.make_mma(
                mmas, stages, pipelines, schedule, thread, softmax, epilogue, spare.toint()
            ).run()
        if const_expr(cfg.cluster > 1):
            # No CTA leaves while another may still arrive at its barriers.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def make_accumulator(self, tiled_mma: cute.TiledMma, n: int) -> cute.Tensor:
        """(MMA, MMA_M, MMA_N): 64 rows of a warpgroup."""
        return cute.make_rmem_tensor(tiled_mma.partition_shape_C((MMA_M, n)), Float32)

    def make_mma(
        self,
        mmas: TiledMmas,
        stages: Stages,
        pipelines: Pipelines,
        schedule: TileSchedule,
        thread: Thread,
        softmax: Softmax,
        epilogue: EpilogueRole,
        spare: Int32,
    ) -> MmaRole:
        """Fragments and accumulators of a consumer thread."""
        cfg = self.config
        scores, output = mmas.scores.get_slice(0), mmas.output.get_slice(0)
        sVt = stages.sV
        if not cfg.is_fp8:
            transposed = cute.select(sVt.layout, mode=[1, 0, 2])
            sVt = cute.make_tensor(sVt.iterator, transposed)
        shape_p = mmas.output.partition_shape_A((MMA_M, cfg.tile.n))
        return MmaRole(
            cfg,
            mmas,
            stages,
            pipelines,
            schedule,
            thread,
            softmax,
            epilogue,
            tSrQ=mmas.scores.make_fragment_A(scores.partition_A(stages.sQ)),
            tSrK=mmas.scores.make_fragment_B(scores.partition_B(stages.sK)),
            tOrP=cute.make_rmem_tensor(shape_p, DTYPES[cfg.dtype]),
            tOrV=mmas.output.make_fragment_B(output.partition_B(sVt)),
            tOrO=self.make_accumulator(mmas.output, cfg.d_head),
            spare=spare,
        )

    def allocate_stages(self, smem: SmemAllocator) -> Stages:
        """Shared memory of the three rings."""
        cfg = self.config
        num_stages = cfg.tile.num_stages
        layouts = [
            cute.tile_to_shape(
                swizzle_atom(cfg, panel), (panel.rows, panel.columns, stages), order=(0, 1, 2)
            )
            for panel, stages in (
                (cfg.query_panel, CONSUMER_WARPGROUPS),
                (cfg.key_panel, num_stages),
                (cfg.value_panel, num_stages),
            )
        ]
        return Stages(
            *(
                smem.allocate_tensor(
                    DTYPES[cfg.dtype],
                    layout.outer,
                    byte_alignment=SMEM_ALIGN_BYTES,
                    swizzle=layout.inner,
                )
                for layout in layouts
            )
        )

    @cute.jit
    def make_pipelines(self, smem: SmemAllocator) -> Pipelines:
        """Initialises all barriers; nobody may use them before the cluster has met."""
        cfg = self.config
        return Pipelines(
            self.make_pipeline(smem, cfg.query_pipeline, 1),
            self.make_pipeline(smem, cfg.block_pipeline, cfg.cluster),
            self.make_pipeline(smem, cfg.block_pipeline, cfg.cluster),
        )

    @cute.jit
    def make_pipeline(
        self, smem: SmemAllocator, facts: PipelineFacts, cluster: int
    ) -> PipelineTmaAsync:
        """One ring, whose loads reach ``cluster`` CTAs."""
        return PipelineTmaAsync.create(
            barrier_storage=smem.allocate_array(Int64, 2 * facts.num_stages),
            num_stages=facts.num_stages,
            producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, facts.empty_arrivals),
            tx_count=facts.full_bytes,
            cta_layout_vmnk=cute.make_layout((1, cluster, 1, 1)),
            mcast_mode_mn=(0, 1),
            defer_sync=True,
        )


def fake_operands(config: SdpaConfig) -> tuple:
    """Fake tensors in ``__call__`` order, without the stream; B, S, Sk and strides are dynamic."""
    return (*fake_tensors(config), Float32(1.0))


def fake_tensors(config: SdpaConfig) -> tuple:
    """The tensors among them."""
    batch, seqlen_q, seqlen_k = (cute.sym_int() for _ in range(3))

    def rows(seqlen, heads, name, multiple=VEC):
        pitches = (cute.sym_int64(divisibility=multiple) for _ in range(3))
        shape = (batch, seqlen, heads, config.d_head)
        return make_fake_tensor(DTYPES[name], shape, (*pitches, 1), assumed_align=16)

    lse, seq_lens = None, None
    if config.has_lse:
        shape = (batch, config.h_q, seqlen_q)
        lse = make_fake_compact_tensor(Float32, shape, stride_order=(2, 1, 0), assumed_align=4)
    if config.has_seq_lens:
        seq_lens = make_fake_compact_tensor(Int32, (batch,), assumed_align=4)
    vec = 16 // config.element_bytes
    return (
        rows(seqlen_q, config.h_q, config.dtype, vec),
        rows(seqlen_k, config.h_kv, config.dtype, vec),
        rows(seqlen_k, config.h_kv, config.dtype, vec),
        rows(seqlen_q, config.h_q, config.o_dtype),
        rows(seqlen_q, config.h_q, config.act_dtype) if config.has_gate else None,
        lse,
        seq_lens,
    )
