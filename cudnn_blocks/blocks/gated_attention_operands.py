# SPDX-License-Identifier: Apache-2.0
"""The operand table of the gated attention block, in the order of ``execute``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry import GatedAttentionGeometry
from cudnn_blocks.norm_rope_operands import norm_rope_operands
from cudnn_blocks.operands import (
    Contiguous,
    Operand,
    OperandTable,
    StrideRule,
    check_activation_dtype,
)
from cudnn_blocks.stages.gemm.epilogues import NormRope
from cudnn_blocks.strided import PitchedRows
from cudnn_blocks.tensor_spec import TensorSpec


@dataclass(frozen=True)
class Presence:
    """Which optional operands a plan declares."""

    has_norm: bool
    has_rope: bool
    has_seq_lens: bool
    has_lse: bool


def operand_table(
    geometry: GatedAttentionGeometry,
    dtype: torch.dtype,
    presence: Presence,
    *,
    has_compact_rows: bool = False,
) -> OperandTable:
    """Every tensor of a call but the workspace; ``h`` and ``out`` compact for some engines."""
    d_model, compact = geometry.d_model, Contiguous()
    rows: StrideRule = compact if has_compact_rows else PitchedRows()
    small = norm_rope_operands(
        dtype,
        geometry.d_head,
        geometry.rope_dim,
        NormRope.table_multiple(geometry.rope_dim),
        has_norm=presence.has_norm,
        has_rope=presence.has_rope,
    )
    return OperandTable(
        (
            Operand("h", dtype, ("B", "S", d_model), rows),
            Operand("w_qkvg", dtype, (geometry.n_qkvg, d_model), compact),
            *small,
            Operand("w_o", dtype, (d_model, geometry.attn_width), compact),
            Operand("out", dtype, ("B", "S", d_model), rows, is_mutated=True),
            Operand(
                "seq_lens",
                torch.int32,
                ("B",),
                compact,
                alignment_bytes=4,
                is_declared=presence.has_seq_lens,
                has_sample=False,
            ),
            Operand(
                "lse",
                torch.float32,
                ("B", geometry.h_q, "S"),
                compact,
                is_mutated=True,
                is_declared=presence.has_lse,
                has_sample=False,
            ),
        )
    )


def check_samples_fit(
    geometry: GatedAttentionGeometry, specs: Mapping[str, TensorSpec], presence: Presence
) -> torch.dtype:
    """The activation dtype of samples whose presence agrees with the geometry.

    Raises:
        ContractError: a dtype outside the contract, or a sample too many or too few.
    """
    dtype = specs["h"].dtype
    check_activation_dtype("h", dtype)
    geometry.validate_hidden(specs["h"].shape)
    needed = {
        "w_q_norm": (presence.has_norm, f"qk_norm is {geometry.qk_norm}"),
        "w_k_norm": (presence.has_norm, f"qk_norm is {geometry.qk_norm}"),
        "cos": (presence.has_rope, f"rope_dim is {geometry.rope_dim}"),
        "sin": (presence.has_rope, f"rope_dim is {geometry.rope_dim}"),
    }
    for name, (is_needed, why) in needed.items():
        if is_needed and name not in specs:
            raise ContractError(f"sample_{name}", f"a tensor, since {why}", None)
        if not is_needed and name in specs:
            raise ContractError(f"sample_{name}", f"None, since {why}", "a tensor")
    return dtype


def with_rows_at_one_pitch(x: torch.Tensor | None) -> torch.Tensor | None:
    """``[B, S, K]`` whose stride of axis 1 is the distance of its rows, for S = 1 as well."""
    assert x is not None, "h and out are required"
    batch, tokens, columns = x.shape
    step, pitch, _ = x.stride()
    if tokens > 1 or step == pitch or batch == 1:
        return x
    return x.as_strided((batch, tokens, columns), (step, step, 1))
