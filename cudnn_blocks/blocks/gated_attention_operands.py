# SPDX-License-Identifier: Apache-2.0
"""The operand table of the gated attention block, in the order of ``execute``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from cudnn_blocks.blocks.gated_attention_modes import Precision
from cudnn_blocks.blocks.gated_attention_precision import BLOBS, Formats, OperandFormat
from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry import GatedAttentionGeometry
from cudnn_blocks.norm_rope_operands import norm_rope_operands
from cudnn_blocks.operands import (
    Contiguous,
    Extents,
    Operand,
    OperandTable,
    StrideRule,
)
from cudnn_blocks.reference.scale_blobs import blob_bytes
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


H_BLOB_BYTES = "bytes of h_sf"
"""The extent of ``h_sf``, which B and S give."""
_ROW_PITCH_BYTES = 16


def operand_table(
    geometry: GatedAttentionGeometry,
    formats: Formats,
    presence: Presence,
    *,
    has_compact_rows: bool = False,
) -> OperandTable:
    """Every tensor of a call but the workspace; ``h`` and ``out`` compact for some engines."""
    d_model, attn_width, compact = geometry.d_model, geometry.attn_width, Contiguous()
    dtype, h, w_qkvg, w_o = formats.activation, formats.h, formats.w_qkvg, formats.w_o

    def rows(of: torch.dtype) -> StrideRule:
        return compact if has_compact_rows else PitchedRows(_ROW_PITCH_BYTES // of.itemsize)

    h_rows = rows(h.dtype) if h.block is None else compact

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
            Operand("h", h.dtype, ("B", "S", d_model), h_rows),
            Operand("w_qkvg", w_qkvg.dtype, (geometry.n_qkvg, w_qkvg.columns(d_model)), compact),
            *small,
            Operand("w_o", w_o.dtype, (d_model, w_o.columns(attn_width)), compact),
            Operand("out", dtype, ("B", "S", d_model), rows(dtype), is_mutated=True),
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
            *_blobs(geometry, formats),
        )
    )


def _blobs(geometry: GatedAttentionGeometry, formats: Formats) -> Iterator[Operand]:
    """The scale blobs, flat; those that the formats have no use for are not in the table."""
    sizes: dict[str, tuple[OperandFormat, int | None, int]] = {
        "h_sf": (formats.h, None, geometry.d_model),
        "w_qkvg_sf": (formats.w_qkvg, geometry.n_qkvg, geometry.d_model),
        "w_o_sf": (formats.w_o, geometry.d_model, geometry.attn_width),
    }
    for name, (one, num_rows, k) in sizes.items():
        if one.block is not None and one.blob_dtype is not None:
            blocks = k // one.block.block_size
            extent = H_BLOB_BYTES if num_rows is None else blob_bytes(num_rows, blocks)
            yield Operand(name, one.blob_dtype, (extent,), Contiguous())


def check_h_blob(geometry: GatedAttentionGeometry, formats: Formats, extents: Extents) -> None:
    """Raises ContractError where ``h_sf`` has not the bytes that B and S ask for."""
    if formats.h.block is not None:
        rows, blocks = extents["B"] * extents["S"], geometry.d_model // formats.h.block.block_size
        expected, got = blob_bytes(rows, blocks), extents[H_BLOB_BYTES]
        if got != expected:
            raise ContractError("h_sf", f"shape [{expected}] for {rows} rows", [got])


def check_samples_fit(
    geometry: GatedAttentionGeometry,
    specs: Mapping[str, TensorSpec],
    presence: Presence,
    precision: Precision,
) -> None:
    """Raises ContractError for a sample too many or too few, or ``h`` of another shape."""
    geometry.validate_hidden(specs["h"].shape)
    blobs = dict.fromkeys(BLOBS, (precision.is_block_scaled, f"quant is {precision.value}"))
    blobs["w_o_sf"] = (precision is Precision.MX_FP4_O, f"quant is {precision.value}")
    needed = {
        "w_q_norm": (presence.has_norm, f"qk_norm is {geometry.qk_norm}"),
        "w_k_norm": (presence.has_norm, f"qk_norm is {geometry.qk_norm}"),
        "cos": (presence.has_rope, f"rope_dim is {geometry.rope_dim}"),
        "sin": (presence.has_rope, f"rope_dim is {geometry.rope_dim}"),
        **blobs,
    }
    for name, (is_needed, why) in needed.items():
        if is_needed and name not in specs:
            raise ContractError(f"sample_{name}", f"a tensor, since {why}", None)
        if not is_needed and name in specs:
            raise ContractError(f"sample_{name}", f"None, since {why}", "a tensor")


def with_rows_at_one_pitch(x: torch.Tensor | None) -> torch.Tensor | None:
    """``[B, S, K]`` whose stride of axis 1 is the distance of its rows, for S = 1 as well."""
    assert x is not None, "h and out are required"
    batch, tokens, columns = x.shape
    step, pitch, _ = x.stride()
    if tokens > 1 or step == pitch or batch == 1:
        return x
    return x.as_strided((batch, tokens, columns), (step, step, 1))
