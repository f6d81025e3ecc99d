# SPDX-License-Identifier: Apache-2.0
"""Sigmoid gate of an attention output (sm_80 and newer).

    out = A(float(o) * sigmoid(float(gate)))       A: one rounding to the activation dtype

Grid:      x only: the CTAs of batch 0, of batch 1 ... No limit on either. No shared memory.
Threads:   each holds one 16-byte vector of ``tokens`` neighbouring tokens, of O and of the gate;
           all are loaded before the first use. Neighbouring threads hold neighbouring vectors.
Overlap:   with PDL the next grid may start at once; all memory is touched after the wait.
Requires:  D a multiple of 8; innermost strides 1, the others multiples of 8; 16-byte aligned
           pointers; S * H * D / 8 at most 2**31 - 2**16. 64-bit offsets. ``out`` may be ``o``.
Source:    written for this project; behaviour after the gated attention block of cudnn-frontend.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import CacheEvictionPriority
from cutlass.cute.runtime import make_fake_tensor

from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.device.masked_store import store_16_if
from cudnn_blocks.stages.device.sigmoid import gated
from cudnn_blocks.stages.gate.portable_config import VEC, SigmoidGateConfig

PAIRS = 4  # registers of one access
VEC_BYTES = 16


class SigmoidGateKernel:
    """The gate in one pass; see the module docstring."""

    def __init__(self, config: SigmoidGateConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]

    @cute.jit
    def __call__(self, o: cute.Tensor, gate: cute.Tensor, out: cute.Tensor, stream):
        cfg = self.config
        batch_threads = ((o.shape[1] - 1) // cfg.tokens + 1) * cfg.token_vecs
        batch_ctas = (batch_threads - 1) // cfg.threads + 1
        self.kernel(o, gate, out, cute.fast_divmod_create_divisor_v2(batch_ctas)).launch(
            grid=(o.shape[0] * batch_ctas, 1, 1),
            block=(cfg.threads, 1, 1),
            stream=stream,
            use_pdl=cfg.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mGate: cute.Tensor,
        mOut: cute.Tensor,
        batch_ctas: cute.FastDivmodDivisorV2,
    ):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        b, tile = divmod(bidx, batch_ctas)
        index = tile * cfg.threads + tidx
        vec = index % cfg.token_vecs
        first = index // cfg.token_vecs * cfg.tokens

        rO = cute.make_rmem_tensor((PAIRS, cfg.tokens), Int32)
        rGate = cute.make_rmem_tensor((PAIRS, cfg.tokens), Int32)
        for t in cutlass.range_constexpr(cfg.tokens):
            # Past the end the last token stands in; nothing of it is stored.
            token = cutlass.min(first + t, mO.shape[1] - 1)
            self.load(self.vector_of(mO, b, token, vec), rO[None, t])
            self.load(self.vector_of(mGate, b, token, vec), rGate[None, t])
        o, gate = cute.recast_tensor(rO, self.dtype), cute.recast_tensor(rGate, self.dtype)
        for t in cutlass.range_constexpr(cfg.tokens):
            o[None, t].store(gated(o[None, t].load(), gate[None, t].load()))
            token = first + t
            gOut = self.vector_of(mOut, b, token, vec)
            store_16_if(token < mO.shape[1], rO[None, t].load(), gOut.iterator)

    @cute.jit
    def load(self, gX: cute.Tensor, rX: cute.Tensor):
        """What is read once does not displace anything in L1."""
        cute.autovec_copy(gX, rX, l1c_evict_priority=CacheEvictionPriority.NO_ALLOCATE)

    @cute.jit
    def vector_of(self, mX: cute.Tensor, b: Int32, token: Int32, vec: Int32) -> cute.Tensor:
        """16 bytes of a token, as pairs."""
        cfg = self.config
        head, column = vec // cfg.head_vecs, vec % cfg.head_vecs
        offset = Int64(b) * mX.stride[0] + Int64(token) * mX.stride[1]
        offset = cute.assume(offset + Int64(head) * mX.stride[2] + column * VEC, divby=VEC)
        ptr = cute.recast_ptr(mX.iterator + offset, dtype=Int32)
        return cute.make_tensor(ptr, cute.make_layout(PAIRS))


def fake_operands(config: SigmoidGateConfig) -> tuple:
    """Fake tensors in ``__call__`` order, without the stream; B, S and strides are dynamic."""
    shape = (cute.sym_int(), cute.sym_int(), config.h_q, config.d_head)

    def strided():
        stride = (*(cute.sym_int64(divisibility=VEC) for _ in range(3)), 1)
        return make_fake_tensor(DTYPES[config.dtype], shape, stride, assumed_align=VEC_BYTES)

    return strided(), strided(), strided()
