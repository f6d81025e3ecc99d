# SPDX-License-Identifier: Apache-2.0
"""One host call for all launches of the gated attention block.

    proj = gemm(h, w_qkvg)                              Q, GATE, K, V: column bands of proj
    Q, K = qk_norm_rope(Q, K, ...)                      unless it is the epilogue of the projection
    o    = sdpa(Q, K, V)                                gated, where the gate is its epilogue
    o    = sigmoid_gate(o, GATE)                        unless it is
    out  = gemm(o, w_o)

The kernels are those of the stages, specialised and ordered as the stages have them; between them
lie views of the workspace, which are made here instead of once per call in Python. The launcher
checks every operand before the first launch, save strides that would follow from run-time extents.

Grid, threads, shared memory, rounding, overlap: those of each kernel.
Requires:  operands as docs/gated_attention.md has them, tables of at least S rows, a workspace that
           holds both regions, B and S at least 1. ``o_offset`` is a multiple of 256.
Source:    written for this project.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from cudnn_blocks.stages.device.dtypes import DTYPES
from cudnn_blocks.stages.gated_attention.launcher_config import LauncherConfig
from cudnn_blocks.stages.kernel_cache import resolve

VEC = 8  # elements of one 16-byte access
ALIGN_BYTES = 16
REGION_ALIGN_BYTES = 256


class GatedAttentionLauncher:
    """Every launch of one call; see the module docstring."""

    def __init__(self, config: LauncherConfig):
        self.config = config
        self.kernels = {step.slot: resolve(step.kernel)(step.config) for step in config.steps}

    @cute.jit
    def __call__(
        self,
        h: cute.Tensor,
        w_qkvg: cute.Tensor,
        w_q_norm: cute.Tensor | None,
        w_k_norm: cute.Tensor | None,
        cos: cute.Tensor | None,
        sin: cute.Tensor | None,
        w_o: cute.Tensor,
        out: cute.Tensor,
        seq_lens: cute.Tensor | None,
        lse: cute.Tensor | None,
        workspace: cute.Tensor,
        o_offset: Int64,
        eps: Float32,
        scale: Float32,
        stream,
    ):
        cfg, kernels = self.config, self.kernels
        w_qkvg, w_o = self.matrix(w_qkvg), self.matrix(w_o)
        h, out = self.rows(h), self.rows(out)
        proj = self.rows(self.region(workspace, Int64(0), h, (cfg.n_qkvg,)))
        o = self.region(workspace, o_offset, h, (cfg.h_q, cfg.d_head))
        o_rows = self.rows(self.region(workspace, o_offset, h, (cfg.h_q * cfg.d_head,)))
        q, gate, k, v = self.bands(proj)
        norm_rope = (w_q_norm, w_k_norm, cos, sin, eps)
        if const_expr("qkv_gate_proj" in kernels):
            kernels["qkv_gate_proj"](h, w_qkvg, proj, stream)
            kernels["qk_norm_rope"](q, k, *norm_rope, stream)
        else:
            kernels["qkv_gate_proj_norm_rope"](h, w_qkvg, proj, *norm_rope, stream)
        if const_expr("sigmoid_gate" in kernels):
            kernels["sdpa"](q, k, v, o, None, lse, seq_lens, scale, stream)
            kernels["sigmoid_gate"](o, gate, o, stream)
        else:
            kernels["sdpa"](q, k, v, o, gate, lse, seq_lens, scale, stream)
        kernels["out_proj"](o_rows, w_o, out, stream)

    def rows(self, x: cute.Tensor) -> cute.Tensor:
        """``[B, S, C]`` with C as a run-time value, which the GEMM kernels take."""
        b, s, columns = x.shape
        return self.view(x.iterator, (b, s, self.extent(columns)), x.stride)

    def matrix(self, w: cute.Tensor) -> cute.Tensor:
        """``[N, K]`` with both as run-time values."""
        return self.view(w.iterator, tuple(map(self.extent, w.shape)), w.stride)

    def extent(self, size: int) -> Int32:
        return cute.assume(Int32(size), divby=VEC)

    def region(self, workspace: cute.Tensor, offset: Int64, h: cute.Tensor, inner: tuple):
        """``[B, S, *inner]`` at a byte offset of the workspace, compact."""
        cfg = self.config
        b, s, _ = h.shape
        offset = cute.assume(offset, divby=REGION_ALIGN_BYTES)
        start = cute.recast_ptr(workspace.iterator + offset, dtype=DTYPES[cfg.dtype])
        width = 1
        for extent in inner:
            width *= extent
        return self.view(start, (b, s, *inner), (s * Int64(width), Int64(width), *inner[1:], 1))

    def bands(self, proj: cute.Tensor):
        """Q, GATE, K and V ``[B, S, H, D]`` of the slab."""
        cfg = self.config
        b, s, _ = proj.shape
        views, column = [], 0
        for heads in (cfg.h_q, cfg.h_q, cfg.h_kv, cfg.h_kv):
            stride = (proj.stride[0], proj.stride[1], cfg.d_head, 1)
            views.append(self.view(proj.iterator + column, (b, s, heads, cfg.d_head), stride))
            column += heads * cfg.d_head
        return views

    def view(self, start, shape: tuple, stride: tuple) -> cute.Tensor:
        """A tensor as the stages' own host calls take it: 64-bit strides, multiples of 8."""
        outer = [cute.assume(Int64(step), divby=VEC) for step in stride[:-1]]
        return cute.make_tensor(start, cute.make_layout(shape, stride=(*outer, stride[-1])))


def fake_operands(config: LauncherConfig) -> tuple:
    """Fake operands in ``__call__`` order, without the stream; B, S, T and pitches are dynamic."""
    b, s, table_rows = (cute.sym_int() for _ in range(3))
    dtype, d_model = DTYPES[config.dtype], config.d_model

    def strided(*shape, multiple=VEC):
        stride = (*(cute.sym_int64(divisibility=multiple) for _ in shape[1:]), 1)
        return make_fake_tensor(dtype, shape, stride, assumed_align=ALIGN_BYTES)

    def compact(*shape, of=dtype, align=ALIGN_BYTES):
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(of, shape, stride_order=order, assumed_align=align)

    def table():
        if not config.rope_dim:
            return None
        return strided(b, table_rows, config.rope_dim, multiple=config.table_multiple)

    norm = compact(config.d_head) if config.has_norm else None
    attn_width = config.h_q * config.d_head
    return (
        strided(b, s, d_model),
        compact(config.n_qkvg, d_model),
        norm,
        norm,
        table(),
        table(),
        compact(d_model, attn_width),
        strided(b, s, d_model),
        compact(b, of=Int32, align=4) if config.has_seq_lens else None,
        compact(b, config.h_q, s, of=Float32) if config.has_lse else None,
        compact(cute.sym_int64(), of=Uint8, align=REGION_ALIGN_BYTES),
        Int64(0),
        Float32(1e-6),
        Float32(1.0),
    )
