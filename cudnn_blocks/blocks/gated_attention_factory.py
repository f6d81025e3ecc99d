# SPDX-License-Identifier: Apache-2.0
"""Builds each stage of the gated attention block from the plan's facts, by its slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from cudnn_blocks.blocks.gated_attention_modes import (
    GATE,
    NORM_ROPE,
    OUT_PROJ,
    PROJ,
    PROJ_NORM_ROPE,
    QUANTIZE_FP4_O,
    QUANTIZE_KV,
    QUANTIZE_MX_K,
    QUANTIZE_MX_Q,
    QUANTIZE_MX_V,
    QUANTIZE_O,
    QUANTIZE_Q,
    SDPA,
    Mode,
)
from cudnn_blocks.blocks.gated_attention_operands import Presence
from cudnn_blocks.blocks.gated_attention_precision import Formats, Quant, set_scalars
from cudnn_blocks.blocks.mx_projection_stage import MxProjectionStage
from cudnn_blocks.blocks.mx_sdpa_stage import MxSdpaStage
from cudnn_blocks.geometry import GatedAttentionGeometry
from cudnn_blocks.operands import ACTIVATION_DTYPES
from cudnn_blocks.quant_spec import E4M3, MXFP8
from cudnn_blocks.stages.attention.stage import SdpaModes, SdpaStage
from cudnn_blocks.stages.dequant_gemm.stage import DequantGemmModes, DequantGemmStage
from cudnn_blocks.stages.gate.stage import SigmoidGateModes, SigmoidGateStage
from cudnn_blocks.stages.gemm.epilogues import NormRope
from cudnn_blocks.stages.gemm.stage import GemmModes, GemmStage
from cudnn_blocks.stages.qk_norm_rope.stage import QkNormRopeModes, QkNormRopeStage
from cudnn_blocks.stages.quantize.portable_config import FP8
from cudnn_blocks.stages.quantize.stage import QuantizeKvStage, QuantizeModes, QuantizeStage
from cudnn_blocks.stages.stage import Stage
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

E4M3_NAME = "e4m3"
_QKVO = frozenset({"q", "k", "v", "o", "q8", "k8", "v8", "o8"})
_IN_MXFP8 = (QUANTIZE_MX_Q, QUANTIZE_MX_K, QUANTIZE_MX_V)
_OF_KV = (QUANTIZE_KV, QUANTIZE_MX_K, QUANTIZE_MX_V)


@dataclass(frozen=True)
class StageFactory:
    """The plan's facts."""

    geometry: GatedAttentionGeometry
    formats: Formats
    presence: Presence
    mode: Mode
    quant: Quant | None
    specs: Mapping[str, TensorSpec]
    """Samples, and tensors with heads of the workspace, at the samples' extents."""
    target: Target

    def build(self, slot: str, engine: str | None) -> Stage:
        """The stage of a slot, unchecked."""
        stage = self._BUILDERS[slot](self, slot, engine)
        if self.quant is not None:
            set_scalars([stage], self.quant, self.geometry)
        return stage

    @property
    def dtype(self) -> str:
        """Of activations, as stages call it."""
        return ACTIVATION_DTYPES[self.formats.activation]

    @property
    def num_rows(self) -> int:
        """Tokens over all entries."""
        batch, tokens, _ = self.specs["h"].shape
        return batch * tokens

    @property
    def tokens(self) -> int:
        """S."""
        return self.specs["h"].shape[1]

    def _norm_rope(self, slot: str, engine: str | None) -> Stage:
        one = self.geometry
        sizes = (one.h_q, one.h_kv, one.d_head, one.rope_dim)
        norm_rope = QkNormRopeModes(self.dtype, *sizes, has_norm=one.qk_norm)
        return QkNormRopeStage(norm_rope, one.qk_norm_eps, self.tokens, self.target, engine)

    def _gate(self, slot: str, engine: str | None) -> Stage:
        gate = SigmoidGateModes(self.dtype, self.geometry.h_q, self.geometry.d_head)
        return SigmoidGateStage(gate, self.tokens, self.target, engine)

    def _projection(self, slot: str, engine: str | None) -> Stage:
        one, block = self.geometry, self.formats.w_qkvg.block
        if slot == PROJ or block is None:
            return self._gemm(slot, engine)
        modes = GemmModes(one.n_qkvg, one.d_model, self.dtype, self._fused_norm_rope)
        h = self.specs["h"]
        return MxProjectionStage(
            slot,
            modes,
            block,
            (h.shape[0], self.tokens),
            self.target,
            engine,
            eps=one.qk_norm_eps,
            has_seq_lens=self.presence.has_seq_lens,
            device=h.device,
        )

    @property
    def _fused_norm_rope(self) -> NormRope:
        one = self.geometry
        return NormRope(one.d_head, one.h_q, one.h_kv, one.rope_dim, one.qk_norm)

    def _gemm(self, slot: str, engine: str | None) -> Stage:
        one, is_out, device = self.geometry, slot == OUT_PROJ, self.specs["h"].device
        n, k = (one.d_model, one.attn_width) if is_out else (one.n_qkvg, one.d_model)
        w = self.formats.w_o if is_out else self.formats.w_qkvg
        if w.block is not None:
            products = DequantGemmModes(n, k, w.block, w.block if is_out else MXFP8)
            return DequantGemmStage(slot, products, self.num_rows, self.target, engine)
        norm_rope = self._fused_norm_rope if slot == PROJ_NORM_ROPE else None
        dtype = E4M3_NAME if w.dtype == E4M3 else self.dtype
        fast = self.quant is not None and self.quant.fast_accumulation
        modes = GemmModes(n, k, dtype, norm_rope, fast_accumulation=fast)
        facts = (modes, self.num_rows, self.target, engine)
        return GemmStage(slot, *facts, eps=one.qk_norm_eps, device=device)

    def _sdpa(self, slot: str, engine: str | None) -> Stage:
        one, names = self.geometry, self.mode.takes[slot]
        is_mx, is_gated, has_o_codes = "sf_q" in names, GATE not in self.mode.takes, "o8" in names
        is_fp8 = not is_mx and "q8" in names
        modes = SdpaModes.of(
            one,
            E4M3_NAME if is_fp8 else self.dtype,
            has_gate=is_gated,
            has_lse=self.presence.has_lse,
            has_seq_lens=self.presence.has_seq_lens,
            has_o_codes=is_fp8 and has_o_codes,
        )
        qkvo = [name for name in names if name in _QKVO]
        samples = [self.specs[name] for name in qkvo]
        facts = (modes, one.scale, samples, self.target, engine)
        return MxSdpaStage(*facts, has_o_codes=has_o_codes) if is_mx else SdpaStage(*facts)

    def _quantize(self, slot: str, engine: str | None) -> Stage:
        one, rows = self.geometry, self.num_rows
        fmt, heads, d_head = FP8, one.h_kv if slot in _OF_KV else one.h_q, one.d_head
        if slot in _IN_MXFP8:
            fmt = MXFP8.name
        elif slot == QUANTIZE_FP4_O:
            fmt, heads, d_head = str(self.formats.w_o.block), 1, one.attn_width
        is_v = slot == QUANTIZE_MX_V
        has_seq_lens = is_v and self.presence.has_seq_lens
        modes = QuantizeModes(fmt, heads, d_head, self.dtype, is_v, has_seq_lens)
        kind = QuantizeKvStage if slot == QUANTIZE_KV else QuantizeStage
        max_tokens = rows if slot == QUANTIZE_FP4_O else self.tokens
        return kind(slot, modes, max_tokens, self.target, engine)

    _BUILDERS: ClassVar[Mapping[str, Callable[[StageFactory, str, str | None], Stage]]] = {
        PROJ: _projection,
        PROJ_NORM_ROPE: _projection,
        NORM_ROPE: _norm_rope,
        QUANTIZE_Q: _quantize,
        QUANTIZE_KV: _quantize,
        QUANTIZE_MX_Q: _quantize,
        QUANTIZE_MX_K: _quantize,
        QUANTIZE_MX_V: _quantize,
        SDPA: _sdpa,
        GATE: _gate,
        QUANTIZE_O: _quantize,
        QUANTIZE_FP4_O: _quantize,
        OUT_PROJ: _gemm,
    }
