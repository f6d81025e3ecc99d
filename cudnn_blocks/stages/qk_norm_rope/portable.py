# SPDX-License-Identifier: Apache-2.0
"""QK-RMSNorm and partial rotate-half RoPE of Q and K, in place (sm_80 and newer).

    n(i) = x(i) * rsqrt(mean(x**2) + eps) * w(i)       per head over D; x(i) itself without a norm
    y(i) = n(i) * cos(i) - n(i + R/2) * sin(i)         for i < R/2, with R = rope_dim
    y(i) = n(i) * cos(i) + n(i - R/2) * sin(i)         for R/2 <= i < R
    y(i) = n(i)                                        for R <= i < D

All of it in FP32, then one rounding. Without a norm, channels from R on are neither rounded nor
written. The order of the sum depends on D alone, so the channels past R have the same bits
whatever R is.

Grid:      x only: the CTAs of batch 0, of batch 1 ... No limit on either. No shared memory.
Threads:   ``lanes`` neighbouring lanes own a unit: ``heads`` heads of Q, or of K, of one token, for
           which weights, cos and sin are loaded once. Lane l holds the 16-byte vectors l, l + lanes
           ... of each head, all of them loaded before the first use; the row sum is a butterfly,
           outside any branch. Where a lane's channels turn with another lane's, it loads those
           too: the lines are on their way to L1 by then. All of a warp's loads come before its
           first store.
Overlap:   with PDL the next grid may start at once; all memory is touched after the wait.
Requires:  D a multiple of 8; innermost strides 1, those of Q and K multiples of 8, of the tables
           multiples of gcd(8, R/2); 16-byte aligned pointers; S_table >= S; S * (h_q + h_kv) at
           most 2**31 - 2**16. Offsets have 64 bits.
Source:    written for this project; behaviour after the gated attention block of cudnn-frontend.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from cudnn_blocks.stages.device.bf16 import widen
from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.device.masked_store import store_16_if
from cudnn_blocks.stages.qk_norm_rope.portable_config import VEC, QkNormRopeConfig

VEC_BYTES = 16
PAIRS = 4  # registers of one access
ELEMENT_BYTES = 2
SIGN_LOW, SIGN_HIGH = 0x8000, -0x80000000  # sign bits of a pair


@dataclass(frozen=True)
class Operands:
    """Global tensors, None where absent."""

    mQ: cute.Tensor
    mK: cute.Tensor
    mWq: cute.Tensor | None
    mWk: cute.Tensor | None
    mCos: cute.Tensor | None
    mSin: cute.Tensor | None


@dataclass(frozen=True)
class Unit:
    """What one group of lanes works on; addresses are those of this lane's first vector."""

    b: Int32
    s: Int32
    """Token; the last one where the unit is beyond the end."""
    is_inside: Boolean
    is_k: Boolean
    first_head: Int32
    num_heads: Int32
    """All heads of the unit's tensor."""
    address: Int64
    """Of head 0."""
    head_bytes: Int64
    """From a head to the next one."""


class QkNormRopeKernel:
    """Norm and rotation in one pass over Q and K; see the module docstring."""

    def __init__(self, config: QkNormRopeConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        w_q_norm: cute.Tensor | None,
        w_k_norm: cute.Tensor | None,
        cos: cute.Tensor | None,
        sin: cute.Tensor | None,
        eps: Float32,
        stream,
    ):
        cfg = self.config
        batch_ctas = (q.shape[1] * cfg.token_units - 1) // cfg.cta_units + 1
        operands = Operands(q, k, w_q_norm, w_k_norm, cos, sin)
        divisor = cute.fast_divmod_create_divisor_v2(batch_ctas)
        self.kernel(operands, eps, divisor).launch(
            grid=(q.shape[0] * batch_ctas, 1, 1),
            block=(cfg.threads, 1, 1),
            stream=stream,
            use_pdl=cfg.use_pdl,
        )

    @cute.kernel
    def kernel(self, operands: Operands, eps: Float32, batch_ctas: cute.FastDivmodDivisorV2):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        if const_expr(cfg.use_pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        lane = tidx % cfg.lanes
        b, tile = divmod(bidx, batch_ctas)
        unit = self.locate(operands, b, tile * cfg.cta_units + tidx // cfg.lanes, lane)

        rX = [self.load_head(unit, r, lane) for r in range(cfg.heads)]
        rPartner = [self.load_partners(unit, r, lane) for r in range(cfg.heads)]
        rW, rWPartner = self.load_weights(operands, unit, lane)
        rCos, rSin = self.load_turn(operands, unit, lane)
        if const_expr(not cfg.has_own_partners):
            cute.arch.sync_warp()  # a store must not pass the load of another lane's partner

        for r in cutlass.range_constexpr(cfg.heads):
            scale = self.norm_scale(rX[r], eps)
            self.finish(rX[r], rPartner[r], rW, rWPartner, rCos, rSin, scale, lane)
            self.store_head(rX[r], unit, r, lane)

    # Where a unit lies.

    @cute.jit
    def locate(self, operands: Operands, b: Int32, index: Int32, lane: Int32) -> Unit:
        """The unit with this number in its batch."""
        cfg = self.config
        mQ, mK = operands.mQ, operands.mK
        token = index // cfg.token_units
        is_inside = token < mQ.shape[1]
        s = cutlass.min(token, mQ.shape[1] - 1)
        part = index - token * cfg.token_units
        is_k = part >= cfg.q_units
        first = (part - cfg.q_units if is_k else part) * cfg.heads
        q_address, k_address = self.token_address(mQ, b, s), self.token_address(mK, b, s)
        return Unit(
            b=b,
            s=s,
            is_inside=is_inside,
            is_k=is_k,
            first_head=first,
            num_heads=Int32(cfg.h_kv) if is_k else Int32(cfg.h_q),
            address=(k_address if is_k else q_address) + lane * VEC_BYTES,
            head_bytes=(Int64(mK.stride[2]) if is_k else Int64(mQ.stride[2])) * ELEMENT_BYTES,
        )

    @cute.jit
    def token_address(self, mX: cute.Tensor, b: Int32, s: Int32) -> Int64:
        offset = Int64(b) * mX.stride[0] + Int64(s) * mX.stride[1]
        return mX.iterator.toint() + offset * ELEMENT_BYTES

    @cute.jit
    def head_address(self, unit: Unit, r: cutlass.Constexpr[int]) -> Int64:
        """Of this lane's first vector; the last head stands in for those beyond it."""
        head = unit.first_head + r
        if const_expr(self.config.is_ragged):
            head = cutlass.min(head, unit.num_heads - 1)
        return unit.address + Int64(head) * unit.head_bytes

    def vector_at(self, address: Int64) -> cute.Tensor:
        """16 bytes of global memory, as pairs."""
        ptr = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=VEC_BYTES)
        return cute.make_tensor(ptr, cute.make_layout(PAIRS))

    def element_at(self, address: Int64) -> cute.Tensor:
        """One channel of global memory."""
        ptr = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=2)
        return cute.make_tensor(ptr, cute.make_layout(1))

    def is_vector(self, lane: Int32, k: int, limit: int) -> Boolean:
        """Whether this lane's k-th vector is among the first ``limit`` ones."""
        if (k + 1) * self.config.lanes <= limit:
            return Boolean(True)
        return k * self.config.lanes + lane < limit

    # Loads; a lane's vectors of a head are (PAIR, K) registers.

    @cute.jit
    def load_head(self, unit: Unit, r: cutlass.Constexpr[int], lane: Int32) -> cute.Tensor:
        """Zero beyond the head."""
        cfg = self.config
        rX = cute.make_rmem_tensor((PAIRS, cfg.lane_vecs), Int32)
        if const_expr(cfg.lane_vecs * cfg.lanes != cfg.num_vecs):
            rX.fill(0)
        address = self.head_address(unit, r)
        for k in cutlass.range_constexpr(cfg.lane_vecs):
            if self.is_vector(lane, k, cfg.num_vecs):
                gX = self.vector_at(address + k * cfg.lanes * VEC_BYTES)
                cute.autovec_copy(gX, rX[None, k])
        return rX

    @cute.jit
    def load_partners(
        self, unit: Unit, r: cutlass.Constexpr[int], lane: Int32
    ) -> cute.Tensor | None:
        """The channels that this lane's own turn with; None where it has them itself."""
        if const_expr(self.config.has_own_partners):
            return None
        return self.load_turning(self.head_address(unit, r) - lane * VEC_BYTES, lane, True)

    @cute.jit
    def load_turning(
        self, row: Int64, lane: Int32, is_partner: cutlass.Constexpr[bool]
    ) -> cute.Tensor:
        """(PAIR, K) of the lane's channels below R in a row of global memory, or their partners."""
        cfg = self.config
        half_vecs = cfg.half // VEC
        rX = cute.make_rmem_tensor((PAIRS, cfg.lane_rope_vecs), Int32)
        rX.fill(0)
        for k in cutlass.range_constexpr(cfg.lane_rope_vecs):
            vec = k * cfg.lanes + lane
            if self.is_vector(lane, k, cfg.rope_vecs):
                if const_expr(cfg.has_vector_partners):
                    if const_expr(is_partner):
                        vec = vec + half_vecs if vec < half_vecs else vec - half_vecs
                    cute.autovec_copy(self.vector_at(row + vec * VEC_BYTES), rX[None, k])
                else:
                    rX[None, k].store(self.gather(row, vec, is_partner).load())
        return rX

    @cute.jit
    def gather(self, row: Int64, vec: Int32, is_partner: cutlass.Constexpr[bool]) -> cute.Tensor:
        """One vector of it channel by channel, as pairs."""
        half = self.config.half
        rX = cute.make_rmem_tensor(VEC, self.dtype)
        rX.fill(0.0)
        for i in cutlass.range_constexpr(VEC):
            channel = vec * VEC + i
            if channel < self.config.rope_dim:
                source = channel
                if const_expr(is_partner):
                    source = channel + half if channel < half else channel - half
                gX = self.element_at(row + source * ELEMENT_BYTES)
                cute.autovec_copy(gX, cute.make_tensor(rX.iterator + i, cute.make_layout(1)))
        return cute.recast_tensor(rX, Int32)

    @cute.jit
    def load_weights(self, operands: Operands, unit: Unit, lane: Int32) -> tuple:
        """Weights of this lane's channels, and of their partners, as far as they are needed."""
        cfg = self.config
        if const_expr(not cfg.has_norm):
            return None, None
        q_row, k_row = operands.mWq.iterator.toint(), operands.mWk.iterator.toint()
        row = k_row if unit.is_k else q_row
        rW = cute.make_rmem_tensor((PAIRS, cfg.lane_vecs), Int32)
        rW.fill(0)
        for k in cutlass.range_constexpr(cfg.lane_vecs):
            if self.is_vector(lane, k, cfg.num_vecs):
                gW = self.vector_at(row + (k * cfg.lanes + lane) * VEC_BYTES)
                cute.autovec_copy(gW, rW[None, k])
        if const_expr(cfg.has_own_partners):
            return rW, None
        return rW, self.load_turning(row, lane, True)

    @cute.jit
    def load_turn(self, operands: Operands, unit: Unit, lane: Int32) -> tuple:
        """Cosines and sines of this lane's channels; a sine has the sign of its partner's term."""
        cfg = self.config
        if const_expr(cfg.rope_dim == 0):
            return None, None
        cos_row = self.token_address(operands.mCos, unit.b, unit.s)
        sin_row = self.token_address(operands.mSin, unit.b, unit.s)
        rCos = self.load_turning(cos_row, lane, False)
        rSin = self.load_turning(sin_row, lane, False)
        for k in cutlass.range_constexpr(cfg.lane_rope_vecs):
            for j in cutlass.range_constexpr(PAIRS):
                channel = (k * cfg.lanes + lane) * VEC + 2 * j
                low = Int32(SIGN_LOW) if channel < cfg.half else Int32(0)
                high = Int32(SIGN_HIGH) if channel + 1 < cfg.half else Int32(0)
                rSin[j, k] = rSin[j, k] ^ (low | high)
        return rCos, rSin

    # Arithmetic.

    @cute.jit
    def vector_of(self, rX: cute.Tensor, k: cutlass.Constexpr[int]) -> cute.TensorSSA:
        """The k-th vector of (PAIR, K) in FP32."""
        x = cute.recast_tensor(rX, self.dtype)[None, k].load()
        return widen(x) if const_expr(self.dtype is BFloat16) else x.to(Float32)

    @cute.jit
    def norm_scale(self, rX: cute.Tensor, eps: Float32) -> Float32:
        """``rsqrt(mean(x**2) + eps)`` over all lanes of the head; 1 without a norm."""
        cfg = self.config
        if const_expr(not cfg.has_norm):
            return Float32(1.0)
        even, odd = Float32(0.0), Float32(0.0)
        for k in cutlass.range_constexpr(cfg.lane_vecs):
            wide = self.vector_of(rX, k)
            for i in cutlass.range_constexpr(0, VEC, 2):
                even = cute.math.fma(wide[i], wide[i], even)
                odd = cute.math.fma(wide[i + 1], wide[i + 1], odd)
        total = even + odd
        distance = 1
        while const_expr(distance < cfg.lanes):
            total += cute.arch.shuffle_sync_bfly(total, distance)
            distance *= 2
        return cute.math.rsqrt(total * Float32(1.0 / cfg.d_head) + eps, approx=True)

    @cute.jit
    def finish(
        self,
        rX: cute.Tensor,
        rPartner: cute.Tensor | None,
        rW: cute.Tensor | None,
        rWPartner: cute.Tensor | None,
        rCos: cute.Tensor | None,
        rSin: cute.Tensor | None,
        scale: Float32,
        lane: Int32,
    ):
        """Replaces this lane's channels of a head by their results."""
        cfg = self.config
        normal = [self.normalised(rX, rW, k, scale) for k in range(cfg.lane_vecs)]
        for k in cutlass.range_constexpr(cfg.lane_vecs):
            rY = cute.make_rmem_tensor(VEC, Float32)
            rY.store(normal[k])
            if const_expr(k < cfg.lane_rope_vecs):
                if self.is_vector(lane, k, cfg.rope_vecs):
                    if const_expr(cfg.has_own_partners):
                        partner = normal[(k + cfg.lane_rope_vecs // 2) % cfg.lane_rope_vecs]
                    else:
                        partner = self.normalised(rPartner, rWPartner, k, scale)
                    cos, sin = self.vector_of(rCos, k), self.vector_of(rSin, k)
                    for i in cutlass.range_constexpr(VEC):
                        turned = cute.math.fma(partner[i], sin[i], rY[i] * cos[i])
                        if const_expr(cfg.has_vector_partners):
                            rY[i] = turned
                        else:
                            channel = (k * cfg.lanes + lane) * VEC + i
                            rY[i] = turned if channel < cfg.rope_dim else rY[i]
            rOut = cute.make_rmem_tensor(VEC, self.dtype)
            rOut.store(rY.load().to(self.dtype))
            words = cute.recast_tensor(rOut, Int32)
            for j in cutlass.range_constexpr(PAIRS):
                word = words[j]
                if const_expr(not (cfg.has_norm or cfg.has_vector_partners)):
                    # What does not rotate keeps its bits; a pair rotates as a whole, R is even.
                    channel = (k * cfg.lanes + lane) * VEC + 2 * j
                    word = word if channel < cfg.rope_dim else rX[j, k]
                rX[j, k] = word

    @cute.jit
    def normalised(
        self, rX: cute.Tensor, rW: cute.Tensor | None, k: cutlass.Constexpr[int], scale: Float32
    ) -> cute.TensorSSA:
        """The k-th vector in FP32."""
        x = self.vector_of(rX, k)
        if const_expr(self.config.has_norm):
            x = x * scale * self.vector_of(rW, k)
        return x

    @cute.jit
    def store_head(self, rX: cute.Tensor, unit: Unit, r: cutlass.Constexpr[int], lane: Int32):
        cfg = self.config
        address = self.head_address(unit, r)
        is_stored = unit.is_inside
        if const_expr(cfg.is_ragged):
            is_stored = is_stored & (unit.first_head + r < unit.num_heads)
        for k in cutlass.range_constexpr(cfg.lane_vecs):
            gX = self.vector_at(address + k * cfg.lanes * VEC_BYTES)
            is_here = is_stored & self.is_vector(lane, k, cfg.num_vecs)
            store_16_if(is_here, rX[None, k].load(), gX.iterator)


def fake_operands(config: QkNormRopeConfig) -> tuple:
    """Fake operands in ``__call__`` order, without the stream; B, S, T and strides are dynamic."""
    dtype, rope_dim = DTYPES[config.dtype], config.rope_dim
    b, s, table_rows = (cute.sym_int() for _ in range(3))

    def strided(*shape, multiple=VEC):
        stride = (*(cute.sym_int64(divisibility=multiple) for _ in shape[1:]), 1)
        return make_fake_tensor(dtype, shape, stride, assumed_align=VEC_BYTES)

    def weight():
        if not config.has_norm:
            return None
        shape = (config.d_head,)
        return make_fake_compact_tensor(dtype, shape, stride_order=(0,), assumed_align=VEC_BYTES)

    def table():
        if not rope_dim:
            return None
        return strided(b, table_rows, rope_dim, multiple=math.gcd(VEC, rope_dim // 2))

    return (
        strided(b, s, config.h_q, config.d_head),
        strided(b, s, config.h_kv, config.d_head),
        weight(),
        weight(),
        table(),
        table(),
        Float32(1e-6),
    )
