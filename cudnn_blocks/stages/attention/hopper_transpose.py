# SPDX-License-Identifier: Apache-2.0
"""V of e4m3 codes as wgmma takes it: transposed, keys in the order of the probabilities (sm_90a).

    out[b, d, h, 16 i + 4 q + 2 j + e] = v[b, 16 i + 8 j + 2 q + e, h, d]     q 0..3, j 0..1, e 0..1

A thread's accumulators of scores lie in that order where the A operand of a product of codes wants
16 neighbouring keys, so that probabilities move to no other thread. Keys from the length on, and
those that fill up the last block, are 0: they meet weights of 0, and memory may hold NaN there.

Grid:      one CTA per block of ``tile.n`` keys, head and batch entry.
Thread:    16 keys of 4 channels: 16 loads of 4 bytes, byte permutations, 4 stores of 16 bytes.
Overlap:   with PDL the next grid may start at once; all memory is touched after the wait.
Requires:  strides of v multiples of 16, the last one 1; Sk at least 1.
Source:    written for this project.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cudnn_blocks.stages.attention.hopper_config import SdpaConfig

GROUP = 16  # keys that are permuted among themselves
QUAD = 4  # channels of a word
# prmt selectors: bytes of the low halves, or the high halves, of two words in turn; and words of
# the low, or the high, two bytes of either.
LOW_BYTES, HIGH_BYTES = 0x5140, 0x7362
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632


def transposed_values(config: SdpaConfig, v: cute.Tensor, scratch: cute.Tensor) -> cute.Tensor:
    """``[B, D, h_kv, keys]`` in the scratch, keys filled up to whole blocks."""
    n, d_head, h_kv = config.tile.n, config.d_head, config.h_kv
    num_keys = cute.assume((v.shape[1] + n - 1) // n * n, divby=n)
    pitch = cute.assume(Int64(num_keys), divby=n)
    start = cute.recast_ptr(scratch.iterator, dtype=v.element_type)
    stride = (pitch * (d_head * h_kv), pitch, pitch * d_head, 1)
    return cute.make_tensor(
        start, cute.make_layout((v.shape[0], d_head, h_kv, num_keys), stride=stride)
    )


class TransposeValuesKernel:
    """One launch; see the module docstring."""

    def __init__(self, config: SdpaConfig):
        self.config = config
        self.row_quads = config.d_head // QUAD

    @cute.jit
    def __call__(self, v: cute.Tensor, out: cute.Tensor, seq_lens: cute.Tensor | None, stream):
        cfg = self.config
        num_blocks = out.shape[3] // cfg.tile.n
        self.kernel(v, out, seq_lens, num_blocks).launch(
            grid=(num_blocks * cfg.h_kv * v.shape[0], 1, 1),
            block=(cfg.tile.n // GROUP * self.row_quads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self, mV: cute.Tensor, mOut: cute.Tensor, mSeqLens: cute.Tensor | None, num_blocks: Int32
    ):
        cfg = self.config
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        column = bidx // num_blocks
        batch, head = column // cfg.h_kv, column % cfg.h_kv
        channel = tidx % self.row_quads * QUAD
        key = bidx % num_blocks * cfg.tile.n + tidx // self.row_quads * GROUP
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        length = mV.shape[1]
        if const_expr(cfg.has_seq_lens):
            length = cutlass.min(mSeqLens[batch], length)
        rWords = self.load(mV, batch, key, head, channel, length)
        offset = Int64(batch) * mOut.stride[0] + Int64(channel) * mOut.stride[1]
        offset += Int64(head) * mOut.stride[2] + key
        dst = mOut.iterator + cute.assume(offset, divby=GROUP)
        rRows = self.transpose(rWords)
        for c in cutlass.range_constexpr(QUAD):
            row = cute.recast_ptr(dst, dtype=Int32)
            cute.autovec_copy(rRows[None, c], cute.make_tensor(row, cute.make_layout(QUAD)))
            dst = dst + cute.assume(mOut.stride[1], divby=GROUP)

    @cute.jit
    def load(self, mV: cute.Tensor, batch, key, head, channel, length) -> cute.Tensor:
        """(KEY): words of four channels, 0 from the length on."""
        rWords = cute.make_rmem_tensor((GROUP,), Int32)
        base = Int64(batch) * mV.stride[0] + Int64(head) * mV.stride[2] + channel
        for i in cutlass.range_constexpr(GROUP):
            row = cutlass.min(key + i, mV.shape[1] - 1)
            offset = cute.assume(base + Int64(row) * mV.stride[1], divby=QUAD)
            src = cute.recast_ptr(mV.iterator + offset, dtype=Int32)
            word = cute.make_tensor(src, cute.make_layout(1))[0]
            rWords[i] = word if key + i < length else Int32(0)
        return rWords

    @cute.jit
    def transpose(self, rWords: cute.Tensor) -> cute.Tensor:
        """(4, CHANNEL): 16 keys of a channel, permuted."""
        rRows = cute.make_rmem_tensor((QUAD, QUAD), Int32)
        for q in cutlass.range_constexpr(QUAD):
            pairs = [(rWords[8 * j + 2 * q], rWords[8 * j + 2 * q + 1]) for j in range(2)]
            for high, bytes_ in enumerate((LOW_BYTES, HIGH_BYTES)):
                first, second = (cute.arch.prmt(*pair, bytes_) for pair in pairs)
                rRows[q, 2 * high] = cute.arch.prmt(first, second, LOW_HALVES)
                rRows[q, 2 * high + 1] = cute.arch.prmt(first, second, HIGH_HALVES)
        return rRows
