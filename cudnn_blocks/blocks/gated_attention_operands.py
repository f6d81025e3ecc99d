# SPDX-License-Identifier: Apache-2.0
"""The operand table of the gated attention block, in the order of ``execute``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry import GatedAttentionGeometry
from cudnn_blocks.operands import Contiguous, Extents, Operand, OperandTable, StrideRule
from cudnn_blocks.strided import VEC, PitchedRows, Strided
from cudnn_blocks.tensor_spec import TensorSpec

TABLE_ROWS = "T"
"""Rows of the cosine and sine tables: any number from S on."""
ANY_EXTENT = 2**31 - 1
ACTIVATION_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Presence:
    """Which optional operands a plan declares."""

    has_norm: bool
    has_rope: bool
    has_seq_lens: bool
    has_lse: bool


def table_stride_multiple(rope_dim: int) -> int:
    """Elements that the strides of the tables are multiples of; compact ones always are."""
    return max(2, math.gcd(VEC, rope_dim // 2))


def operand_table(
    geometry: GatedAttentionGeometry,
    dtype: torch.dtype,
    presence: Presence,
    *,
    has_compact_rows: bool = False,
) -> OperandTable:
    """Every tensor of a call but the workspace; ``h`` and ``out`` compact for some engines."""
    d_model, d_head = geometry.d_model, geometry.d_head
    compact = Contiguous()
    rows: StrideRule = compact if has_compact_rows else PitchedRows()
    table_shape = ("B", TABLE_ROWS, geometry.rope_dim)
    has_norm, has_rope = presence.has_norm, presence.has_rope
    tables = Strided(table_stride_multiple(geometry.rope_dim))
    return OperandTable(
        (
            Operand("h", dtype, ("B", "S", d_model), rows),
            Operand("w_qkvg", dtype, (geometry.n_qkvg, d_model), compact),
            Operand("w_q_norm", dtype, (d_head,), compact, is_declared=has_norm),
            Operand("w_k_norm", dtype, (d_head,), compact, is_declared=has_norm),
            Operand("cos", dtype, table_shape, tables, is_declared=has_rope),
            Operand("sin", dtype, table_shape, tables, is_declared=has_rope),
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
    if dtype not in ACTIVATION_DTYPES:
        raise ContractError("h", "dtype torch.bfloat16 or torch.float16", dtype)
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


def check_table_rows(extents: Extents) -> None:
    """Raises ContractError where the cosine and sine tables end before the last token."""
    rows, tokens = extents.get(TABLE_ROWS), extents["S"]
    if rows is not None and rows < tokens:
        raise ContractError("cos", f"at least S = {tokens} rows", f"{rows} rows")


def with_rows_at_one_pitch(x: torch.Tensor | None) -> torch.Tensor | None:
    """``[B, S, K]`` whose stride of axis 1 is the distance of its rows, for S = 1 as well."""
    assert x is not None, "h and out are required"
    batch, tokens, columns = x.shape
    step, pitch, _ = x.stride()
    if tokens > 1 or step == pitch or batch == 1:
        return x
    return x.as_strided((batch, tokens, columns), (step, step, 1))
