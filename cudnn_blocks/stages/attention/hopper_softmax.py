# SPDX-License-Identifier: Apache-2.0
"""Online softmax of the Hopper SDPA kernel, on accumulators in registers.

A thread holds two rows of 64 queries, eight apart, and of each the keys ``8 j + 2 q + e`` of a
block (j any, q its lane in the quad, e 0 or 1).

Scores become probabilities by one FMA and one exponential each: ``p = exp2(score * c - max * c)``.
``max`` starts at the lowest finite number, so that masked scores, -inf, give 0 whatever the row has
seen and no test for NaN is needed. It follows the maximum of the row only when that has grown by
more than 2**8: output and row sum share it, hence nothing but the size of both depends on it.

Where the product ``max * c`` is beyond 2**26, what it is rounded by would let the exponential leave
the range of the activation dtype. Such a row has a ``c`` of its own that keeps it there; even then
scores that differ at all have probabilities that differ by 2**7, so that the highest takes it all.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from cudnn_blocks.stages.attention.hopper_config import SdpaConfig
from cudnn_blocks.stages.attention.hopper_schedule import TileSchedule

ROWS = 2  # of a thread
LOWEST = -3.4028234663852886e38


@dataclass(frozen=True)
class Softmax:
    """Running state of a thread's rows."""

    config: SdpaConfig
    scale: Float32
    """To base 2."""
    slack: Float32
    """What a score may exceed the reference maximum by."""
    rS: cute.Tensor
    """Scores of a block, then its probabilities."""
    rMax: cute.Tensor
    rSum: cute.Tensor
    """This thread's part of the row sums."""
    rFactor: cute.Tensor
    """What the output so far has to be multiplied by."""
    rCodes: cute.Tensor | None = None
    """Of e4m3 operands: the rounded probabilities, until the product before has read its own."""

    @classmethod
    def make(cls, cfg: SdpaConfig, scale: Float32, slack: Float32, rS: cute.Tensor) -> "Softmax":
        """State of no rows yet."""
        rMax, rSum, rFactor = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(3))
        rCodes = None
        if cfg.is_fp8:
            rCodes = cute.make_rmem_tensor((cute.size(rS) // 4,), Int32)
            rCodes.fill(0)
        return cls(cfg, scale, slack, rS, rMax, rSum, rFactor, rCodes)

    @cute.jit
    def reset(self):
        """Before the first block of a tile."""
        self.rMax.fill(LOWEST)
        self.rSum.fill(0.0)

    @cute.jit
    def take(self) -> tuple[cute.Tensor, cute.Tensor]:
        """Row sums and reference maxima of a tile; the state is that before the next."""
        rSum, rMax = (cute.make_rmem_tensor((ROWS,), Float32) for _ in range(2))
        for r in cutlass.range_constexpr(ROWS):
            rSum[r] = self.rSum[r]
            rMax[r] = self.rMax[r]
        self.reset()
        return rSum, rMax

    @cute.jit
    def mask(self, schedule: TileSchedule, block: Int32, row: Int32, length: Int32, quad: Int32):
        """Scores of hidden keys become -inf, whatever they were; ``row`` is the thread's first."""
        cfg = self.config
        origin = block * cfg.tile.n + 2 * quad
        for r in cutlass.range_constexpr(ROWS):
            diagonal = row + 8 * r + schedule.diagonal(length)
            end = length
            if const_expr(cfg.is_causal):
                end = cutlass.min(end, diagonal + (cfg.window_right + 1))
            end = end - origin
            start = diagonal - cfg.window_left - origin
            for j in cutlass.range_constexpr(cfg.tile.n // 8):
                for e in cutlass.range_constexpr(2):
                    i = 4 * j + 2 * r + e
                    self.rS[i] = keep_below(self.rS[i], 8 * j + e, end)
                    if const_expr(cfg.has_window_left):
                        self.rS[i] = keep_from(self.rS[i], 8 * j + e, start)

    @cute.jit
    def step(self):
        """Scores to probabilities; updates the state."""
        rS = self.rS
        pairs = self.config.tile.n // 8
        for r in cutlass.range_constexpr(ROWS):
            even, odd = rS[2 * r], rS[2 * r + 1]
            for j in cutlass.range_constexpr(1, pairs):
                even = cute.arch.fmax(even, rS[4 * j + 2 * r])
                odd = cute.arch.fmax(odd, rS[4 * j + 2 * r + 1])
            top = cute.arch.fmax(even, odd)
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1))
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 2))
            old = self.rMax[r]
            new = top if top > old + self.slack else old
            factor = exp2((old - new) * self.scale)
            scale = row_scale(new, self.scale, self.config.max_exponent_bits)
            shift = -(new * scale)
            if const_expr(self.config.weight_bits):
                shift += self.config.weight_bits
            even_sum, odd_sum = Float32(0.0), Float32(0.0)
            for j in cutlass.range_constexpr(pairs):
                i = 4 * j + 2 * r
                even = exp2(fma(rS[i], scale, shift))
                odd = exp2(fma(rS[i + 1], scale, shift))
                rS[i], rS[i + 1] = even, odd
                even_sum += even
                odd_sum += odd
            self.rMax[r] = new
            self.rFactor[r] = factor
            self.rSum[r] = fma(self.rSum[r], factor, even_sum + odd_sum)

    @cute.jit
    def pin(self, spare: Int32):
        """Keeps the exponentials ahead of what follows; ptxas would sink them below a wait.

        The store to shared memory never happens: row sums are not negative.
        """
        cute.arch.inline_ptx(
            "{.reg .pred p; .reg .f32 t; min.f32 t, {$r0}, {$r1}; setp.lt.f32 p, t, 0f00000000; "
            "@p st.shared.f32 [{$r2}], t;}",
            read_only_args=[self.rSum[0], self.rSum[1], spare],
        )

    @cute.jit
    def store_probabilities(self, rP: cute.Tensor):
        """Rounded: the accumulators of one product lie as the A operand of the next wants them."""
        rWords, rS = cute.recast_tensor(rP, Int32), self.rS
        for i in cutlass.range_constexpr(cute.size(rWords)):
            if const_expr(self.config.is_fp8):
                rWords[i] = copied(self.rCodes[i])
            else:
                rWords[i] = packed(rS[2 * i], rS[2 * i + 1], self.config.dtype)

    @cute.jit
    def round_to_codes(self):
        """Frees the registers of the scores. The transposed values are in the order of the keys."""
        rS = self.rS
        for i in cutlass.range_constexpr(cute.size(self.rCodes)):
            # Four keys of row i % 2: two of each of two eights.
            k = 8 * (i // 2) + 2 * (i % 2)
            self.rCodes[i] = packed_codes(rS[k], rS[k + 1], rS[k + 4], rS[k + 5])

    @cute.jit
    def rescale(self, rO: cute.Tensor):
        """Rarely more than a vote."""
        rFactor = self.rFactor
        if cute.arch.vote_any_sync((rFactor[0] != 1.0) | (rFactor[1] != 1.0)):
            for j in cutlass.range_constexpr(self.config.d_head // 8):
                for r in cutlass.range_constexpr(ROWS):
                    for e in cutlass.range_constexpr(2):
                        i = 4 * j + 2 * r + e
                        rO[i] = rO[i] * rFactor[r]


@cute.jit
def exp2(x: Float32) -> Float32:
    """One instruction; results below 2**-126 become 0."""
    return cute.math.exp2(x, approx=True, ftz=True)


@cute.jit
def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """Rounded once."""
    return cute.math.fma(a, b, c)


@cute.jit
def row_scale(top: Float32, scale: Float32, max_bits: cutlass.Constexpr[int]) -> Float32:
    """``scale``, or where ``top * scale`` is beyond 2**max_bits about ``2**max_bits / top``."""
    # bits(2**n / x) = (2 * 127 + n << 23) - bits(x), with an error of 12 %.
    bound = const_expr((2 * 127 + max_bits) << 23)
    return cute.arch.inline_ptx(
        "{.reg .f32 a; .reg .b32 b; abs.f32 a, {$r0}; max.f32 a, a, 0f3F800000; mov.b32 b, a; "
        f"sub.u32 b, 0x{bound:08X}, b; mov.b32 a, b; min.f32 {{$w0}}, a, {{$r1}};}}",
        write_only_types=[Float32],
        read_only_args=[top, scale],
    )


@cute.jit
def packed(low: Float32, high: Float32, dtype: cutlass.Constexpr[str]) -> Int32:
    """A word of two rounded values; vectors of them are put together too late for wgmma."""
    suffix = const_expr("bf16x2" if dtype == "bf16" else "f16x2")
    return cute.arch.inline_ptx(
        f"cvt.rn.{suffix}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[Int32],
        read_only_args=[low, high],
    )


@cute.jit
def packed_codes(a: Float32, b: Float32, c: Float32, d: Float32) -> Int32:
    """Four e4m3 codes, ``a`` lowest; beyond 448 is 448."""
    return cute.arch.inline_ptx(
        "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 h, {$r3}, {$r2}; mov.b32 {$w0}, {l, h};}",
        write_only_types=[Int32],
        read_only_args=[a, b, c, d],
    )


@cute.jit
def copied(x: Int32) -> Int32:
    """The same in a register of its own, written here: no product may be using it."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x]
    )


# A plain select would do, were it not that LLVM makes branches of scores of them.


@cute.jit
def keep_below(x: Float32, k: cutlass.Constexpr[int], end: Int32) -> Float32:
    """``x`` where ``k < end``, else -inf."""
    return cute.arch.inline_ptx(
        f"{{.reg .pred p; setp.gt.s32 p, {{$r1}}, {k}; selp.f32 {{$w0}}, {{$r0}}, 0fFF800000, p;}}",
        write_only_types=[Float32],
        read_only_args=[x, end],
    )


@cute.jit
def keep_from(x: Float32, k: cutlass.Constexpr[int], start: Int32) -> Float32:
    """``x`` where ``k >= start``, else -inf."""
    return cute.arch.inline_ptx(
        f"{{.reg .pred p; setp.le.s32 p, {{$r1}}, {k}; selp.f32 {{$w0}}, {{$r0}}, 0fFF800000, p;}}",
        write_only_types=[Float32],
        read_only_args=[x, start],
    )
