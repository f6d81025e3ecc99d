# SPDX-License-Identifier: Apache-2.0
"""The small operands of QK-norm and RoPE, which three ops take: two weights and two tables."""

from __future__ import annotations

import torch

from cudnn_blocks.errors import ContractError
from cudnn_blocks.operands import Contiguous, Extents, Operand
from cudnn_blocks.strided import Strided

TABLE_ROWS = "T"
"""Rows of the cosine and sine tables: any number from S on."""


def norm_rope_operands(
    dtype: torch.dtype,
    d_head: int,
    rope_dim: int,
    table_multiple: int,
    *,
    has_norm: bool,
    has_rope: bool,
) -> tuple[Operand, ...]:
    """``w_q_norm``, ``w_k_norm``, ``cos`` and ``sin``.

    Args:
        dtype: of all four.
        d_head: elements of a weight.
        rope_dim: columns of a table.
        table_multiple: elements that the strides of the tables are multiples of.
        has_norm: the weights are declared.
        has_rope: the tables are declared.
    """
    shape, strides = ("B", TABLE_ROWS, rope_dim), Strided(table_multiple)
    return (
        *(
            Operand(name, dtype, (d_head,), Contiguous(), is_declared=has_norm)
            for name in ("w_q_norm", "w_k_norm")
        ),
        *(Operand(name, dtype, shape, strides, is_declared=has_rope) for name in ("cos", "sin")),
    )


def check_table_rows(extents: Extents) -> None:
    """Raises ContractError where the cosine and sine tables end before the last token."""
    rows, tokens = extents.get(TABLE_ROWS), extents["S"]
    if rows is not None and rows < tokens:
        raise ContractError("cos", f"at least S = {tokens} rows", f"{rows} rows")
