# SPDX-License-Identifier: Apache-2.0
"""Attention of e4m3 codes, forward, with masks, lengths and a fused gate (sm_90a).

    S   = f32(Q K')                                      of codes; keys j that row i sees
    P   = 256 * exp(scale * S - reference of the row)    FP32; rounded to e4m3, saturating, for
    O   = bf16(f32(P V) / f32(sum P) * descale_v)        the product, summed before it is
    LSE = log(sum exp(scale * S))                        natural logarithm, FP32
    out = bf16(f32(O) * sigmoid(f32(gate)))              with a gate, else O
    out = e4m3(f32(out) * scale_o)                       saturating; where codes are asked for

Two launches: V is transposed into the scratch (hopper_transpose), then the kernel of 16-bit
operands (hopper) runs in its mode of codes: twice the elements in every swizzled row, products of
m64nNk32, probabilities that become the A operand where they are.

Reference:      the maximum of the row so far, or an earlier one that is at most 2**0.75 below it:
                no probability is beyond 431.
Sums:           tensor cores add up products of codes in fewer bits than FP32 has; partial sums are
                not promoted, neither within a row of scores nor over the keys of an output.
Grid, roles, pipelines, cluster, overlap: those of hopper.
Shared memory:  ``smem_bytes``, at most 227 KiB. Scratch: ``SdpaConfig.scratch_bytes``.
Requires:       as hopper; strides of q, k and v multiples of 16; a 256-byte aligned scratch.
Source:         written for this project. No code copied.
"""

import cutlass.cute as cute
from cutlass import Float32, Uint8
from cutlass.cute.runtime import make_fake_compact_tensor

from cudnn_blocks.stages.attention.hopper import LOG2_E, SdpaKernel, fake_tensors
from cudnn_blocks.stages.attention.hopper_config import SdpaConfig
from cudnn_blocks.stages.attention.hopper_epilogue import Scales
from cudnn_blocks.stages.attention.hopper_operands import TiledMmas, TmaOperands, make_tiled_mmas
from cudnn_blocks.stages.attention.hopper_schedule import Extents
from cudnn_blocks.stages.attention.hopper_transpose import TransposeValuesKernel, transposed_values

__all__ = ["SdpaFp8Kernel", "fake_operands"]

SCRATCH_ALIGN_BYTES = 256


class SdpaFp8Kernel(SdpaKernel):
    """Attention of one set of heads in e4m3 codes; see the module docstring."""

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
        scratch: cute.Tensor,
        scale: Float32,
        descale_v: Float32,
        scale_o: Float32,
        stream,
    ):
        cfg = self.config
        values = transposed_values(cfg, v, scratch)
        TransposeValuesKernel(cfg)(v, values, seq_lens, stream)
        extents = Extents.of(cfg, q, k)
        self.codes_kernel(
            self.tma_operands(q, k, values),
            make_tiled_mmas(cfg),
            o,
            gate,
            lse,
            seq_lens,
            Scales(scale * LOG2_E, cfg.max_growth / (scale * LOG2_E), descale_v, scale_o),
            extents,
        ).launch(**self.launch_facts(extents), stream=stream)

    @cute.kernel
    def codes_kernel(
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
        self.run(tma, mmas, mO, mGate, mLse, mSeqLens, scales, extents)


def fake_operands(config: SdpaConfig) -> tuple:
    """Fake operands in ``__call__`` order, without the stream; B, S, Sk and strides are dynamic."""
    scratch = make_fake_compact_tensor(
        Uint8, (cute.sym_int64(),), assumed_align=SCRATCH_ALIGN_BYTES
    )
    return (*fake_tensors(config), scratch, Float32(1.0), Float32(1.0), Float32(1.0))
