# SPDX-License-Identifier: Apache-2.0
"""Requests for the gated attention block and the ops that it is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field

from cudnn_blocks.api_base import APIBase
from cudnn_blocks.blocks import UNIT_SPECS, GatedAttentionBlockFwd, block_samples
from cudnn_blocks.deploy.request import TORCH_DTYPES, Batch, Dtype, Request, Tokens, spec
from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry import GatedAttentionGeometry, SdpaGeometry
from cudnn_blocks.ops import Gemm, QkNormRope, QkvGateProjection, SdpaFwd, SigmoidGate
from cudnn_blocks.quant_spec import E4M3
from cudnn_blocks.tensor_spec import TensorSpec

QueryHeads = Annotated[int, Field(description="query heads")]
KeyHeads = Annotated[int, Field(description="key and value heads")]
QuantName = Literal["fp8", "mxfp8", "mxfp4-weights", "nvfp4-output", "mxfp4-output"]
FastAccumulation = Annotated[
    bool, Field(description="permit sums of e4m3 codes at the tensor cores' precision")
]
RopeDim = Annotated[int, Field(description="leading channels that rotate; 0 for none")]


class _Rows(Request):
    """Activations ``[B, S, ...]``."""

    batch: Batch = 1
    tokens: Tokens = 8192
    dtype: Dtype = "bf16"

    def rows(self, *inner: int) -> TensorSpec:
        """A sample ``[B, S, *inner]``."""
        return spec(self.dtype, self.batch, self.tokens, *inner)


class _Masked(_Rows):
    """Heads and mask of attention, and its optional operands."""

    h_q: QueryHeads
    h_kv: KeyHeads
    d_head: int = 256
    causal: bool = True
    bottom_right: Annotated[bool, Field(description="causal to the last key")] = False
    window_left: Annotated[int, Field(description="keys left of the diagonal; -1 for all")] = -1
    window_right: Annotated[int, Field(description="keys right of a causal diagonal")] = -1
    seq_lens: Annotated[bool, Field(description="a length per batch entry")] = False
    lse: Annotated[bool, Field(description="return the log-sum-exp")] = False

    @property
    def attention(self) -> dict[str, Any]:
        """Fields of a geometry."""
        return {
            "h_q": self.h_q,
            "h_kv": self.h_kv,
            "d_head": self.d_head,
            "is_causal": self.causal,
            "causal_bottom_right": self.bottom_right,
            "window_left": self.window_left,
            "window_right": self.window_right,
        }


class _NormRope(_Rows):
    """QK-norm and RoPE, and their operands."""

    d_head: int = 256
    rope_dim: RopeDim = 64
    qk_norm: bool = True

    def small_samples(self) -> dict[str, TensorSpec | None]:
        """Norm weights and tables, None where there are none."""
        norm = spec(self.dtype, self.d_head) if self.qk_norm else None
        table = self.rows(self.rope_dim) if self.rope_dim else None
        return {
            "sample_w_q_norm": norm,
            "sample_w_k_norm": norm,
            "sample_cos": table,
            "sample_sin": table,
        }


class GatedAttentionBlockRequest(_Masked, _NormRope):
    """The gated attention block."""

    op_class: ClassVar[type[APIBase]] = GatedAttentionBlockFwd
    op: Literal["gated-attention-block"]
    d_model: int
    fuse_norm_rope: bool = False
    fuse_gate: bool = False
    quant: Annotated[QuantName | None, Field(description="operands in codes")] = None
    fast_accumulation: FastAccumulation = False

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        geometry = GatedAttentionGeometry(
            d_model=self.d_model,
            rope_dim=self.rope_dim,
            qk_norm=self.qk_norm,
            **self.attention,
        )
        quant = None if self.quant is None else UNIT_SPECS[self.quant]
        if self.fast_accumulation:
            if quant is None:
                raise ContractError("fast_accumulation", "False without quant", True)
            quant = replace(quant, fast_accumulation=True)
        sizes = (geometry, self.batch, self.tokens)
        return {
            **self.small_samples(),
            **block_samples(*sizes, dtype=TORCH_DTYPES[self.dtype], quant=quant),
            "quant": quant,
            "geometry": geometry,
            "seq_lens_present": self.seq_lens,
            "return_lse": self.lse,
            "fuse_norm_rope": self.fuse_norm_rope,
            "fuse_gate": self.fuse_gate,
        }


class SdpaRequest(_Masked):
    """Scaled dot product attention, gated where a gate is given."""

    op_class: ClassVar[type[APIBase]] = SdpaFwd
    op: Literal["sdpa-fwd"]
    keys: Annotated[int | None, Field(description="largest Sk; by default S")] = None
    gate: Annotated[bool, Field(description="multiply with sigmoid(gate)")] = False

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        queries = self.rows(self.h_q, self.d_head)
        num_keys = self.tokens if self.keys is None else self.keys
        keys = spec(self.dtype, self.batch, num_keys, self.h_kv, self.d_head)
        return {
            "sample_q": queries,
            "sample_k": keys,
            "sample_v": keys,
            "sample_o": queries,
            "geometry": SdpaGeometry(**self.attention),
            "sample_gate": queries if self.gate else None,
            "return_lse": self.lse,
            "seq_lens_present": self.seq_lens,
        }


class QkNormRopeRequest(_NormRope):
    """QK-norm and RoPE in place."""

    op_class: ClassVar[type[APIBase]] = QkNormRope
    op: Literal["qk-norm-rope"]
    h_q: QueryHeads
    h_kv: KeyHeads

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        return {
            "sample_q": self.rows(self.h_q, self.d_head),
            "sample_k": self.rows(self.h_kv, self.d_head),
            **self.small_samples(),
        }


class QkvGateProjectionRequest(_NormRope):
    """The fused projection into the slab ``Q | GATE | K | V``."""

    op_class: ClassVar[type[APIBase]] = QkvGateProjection
    op: Literal["qkv-gate-projection"]
    d_model: int
    h_q: QueryHeads
    h_kv: KeyHeads
    fuse_norm_rope: bool = False

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        geometry = GatedAttentionGeometry(
            d_model=self.d_model,
            h_q=self.h_q,
            h_kv=self.h_kv,
            d_head=self.d_head,
            rope_dim=self.rope_dim,
            qk_norm=self.qk_norm,
        )
        return {
            "sample_h": self.rows(self.d_model),
            "sample_w_qkvg": spec(self.dtype, geometry.n_qkvg, self.d_model),
            "sample_proj": self.rows(geometry.n_qkvg),
            "geometry": geometry,
            "fuse_norm_rope": self.fuse_norm_rope,
            **(self.small_samples() if self.fuse_norm_rope else {}),
        }


class SigmoidGateRequest(_Rows):
    """The gate of an attention output."""

    op_class: ClassVar[type[APIBase]] = SigmoidGate
    op: Literal["sigmoid-gate"]
    h_q: QueryHeads
    d_head: int = 256

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        heads = self.rows(self.h_q, self.d_head)
        return {"sample_o": heads, "sample_gate": heads, "sample_out": heads}


class GemmRequest(Request):
    """A matrix product ``y = x w^T``; of e4m3 codes in BF16."""

    op_class: ClassVar[type[APIBase]] = Gemm
    op: Literal["gemm"]
    batch: Batch = 1
    tokens: Tokens = 8192
    dtype: Annotated[Literal[Dtype, "e4m3"], Field(description="of x and w")] = "bf16"
    n: Annotated[int, Field(description="columns of y")]
    k: Annotated[int, Field(description="columns of x")]
    fast_accumulation: FastAccumulation = False

    def arguments(self) -> dict[str, Any]:
        """See ``Request``."""
        operand: str | torch.dtype = self.dtype
        result = self.dtype
        if self.dtype == "e4m3":
            operand, result = E4M3, "bf16"
        return {
            "sample_x": spec(operand, self.batch, self.tokens, self.k),
            "sample_w": spec(operand, self.n, self.k),
            "sample_y": spec(result, self.batch, self.tokens, self.n),
            "fast_accumulation": self.fast_accumulation,
        }
