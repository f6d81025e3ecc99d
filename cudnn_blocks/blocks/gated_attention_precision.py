# SPDX-License-Identifier: Apache-2.0
"""What a spec says of the block: its precision, the formats of its operands, kernel scalars."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cudnn_blocks.blocks.gated_attention_modes import (
    OUT_PROJ,
    PROJ,
    PROJ_NORM_ROPE,
    QUANTIZE_KV,
    QUANTIZE_O,
    QUANTIZE_Q,
    SDPA,
    Precision,
)
from cudnn_blocks.errors import ContractError, NotServedError
from cudnn_blocks.geometry import GatedAttentionGeometry
from cudnn_blocks.operands import check_activation_dtype
from cudnn_blocks.quant_spec import E4M3, MXFP8, BlockFormat, MxQuantSpec, QuantSpec
from cudnn_blocks.stages.stage import Stage
from cudnn_blocks.tensor_spec import TensorSpec

Quant = QuantSpec | MxQuantSpec
BLOBS = ("h_sf", "w_qkvg_sf", "w_o_sf")
"""Operands that hold scale factors, in the order of ``execute``."""
ROW_BLOCKS_MULTIPLE = 4
"""Scales of a row in one tile of a blob: rows that a blob scales hold whole tiles."""
_PACKED = torch.uint8
_FIXED_FIELDS = frozenset({"dtype", "block_size", "w_qkvg_dtype", "o_fp4", "fast_accumulation"})
"""Fields of a spec that are compiled in."""


@dataclass(frozen=True)
class OperandFormat:
    """Of ``h``, ``w_qkvg`` or ``w_o``."""

    dtype: torch.dtype
    block: BlockFormat | None = None
    """Of a block-scaled operand."""
    blob_dtype: torch.dtype | None = None
    """Of its scale blob."""

    def columns(self, k: int) -> int:
        """Elements of a row of ``k`` values."""
        return k if self.block is None else k // self.block.codes_per_byte


@dataclass(frozen=True)
class Formats:
    """Dtypes of all operands of a plan, as its samples have them."""

    activation: torch.dtype
    """Of ``out``, norm weights and tables, and of what lies between stages and is not in codes."""
    h: OperandFormat
    w_qkvg: OperandFormat
    w_o: OperandFormat


def precision_of(quant: Quant | None) -> Precision:
    """Which pipelines there are for a spec."""
    if quant is None:
        return Precision.ACTIVATION
    if isinstance(quant, QuantSpec):
        return Precision.FP8
    return Precision.MX if quant.o_fp4 is None else Precision.MX_FP4_O


def check_sizes(quant: Quant | None, geometry: GatedAttentionGeometry) -> None:
    """NotServedError for rows that do not hold whole tiles of scale factors."""
    if not isinstance(quant, MxQuantSpec):
        return
    blocks = [MXFP8] if quant.o_fp4 is None else [MXFP8, quant.o_fp4.value]
    served = {"d_model": [MXFP8], "d_head": blocks}
    for name, formats in served.items():
        for one in formats:
            multiple = ROW_BLOCKS_MULTIPLE * one.block_size
            size = getattr(geometry, name)
            if size % multiple:
                got = f"{name}={size} in {one}"
                raise NotServedError("gated-attention-block", got, f"multiples of {multiple}")


def block_formats(quant: Quant | None) -> dict[str, BlockFormat | None]:
    """How ``h``, ``w_qkvg`` and ``w_o`` are block-scaled; None for one that is not."""
    if not isinstance(quant, MxQuantSpec):
        return {"h": None, "w_qkvg": None, "w_o": None}
    w_o = None if quant.o_fp4 is None else quant.o_fp4.value
    return {"h": MXFP8, "w_qkvg": quant.w_qkvg_format, "w_o": w_o}


def formats_of(quant: Quant | None, specs: Mapping[str, TensorSpec]) -> Formats:
    """The formats of the samples; ContractError naming the first of another dtype."""
    if quant is None:
        dtype = specs["h"].dtype
        check_activation_dtype("h", dtype)
        plain = OperandFormat(dtype)
        return Formats(dtype, plain, plain, plain)
    formats = {}
    for name, block in block_formats(quant).items():
        codes = (E4M3,) if block is None else _spellings(block.code_dtype)
        blob_dtype = None
        if block is not None:
            blob_dtype = _dtype_among(f"{name}_sf", specs, (block.scale_dtype, _PACKED))
        formats[name] = OperandFormat(_dtype_among(name, specs, codes), block, blob_dtype)
    return Formats(torch.bfloat16, **formats)


def scalars_of(quant: Quant, geometry: GatedAttentionGeometry) -> dict[str, dict[str, float]]:
    """Stage name to the scalars of its kernels, by attribute; all quantised modes together."""
    out_proj = {"alpha": quant.alpha_o}
    if isinstance(quant, MxQuantSpec):
        return {
            QUANTIZE_O: {"scale": quant.scale_o},
            SDPA: {"scale_o": quant.scale_o},
            OUT_PROJ: out_proj,
        }
    heads = {"scale_q": quant.scale_q, "scale_k": quant.scale_k, "scale_v": quant.scale_v}
    return {
        PROJ: {"alpha": quant.alpha_qkvg},
        PROJ_NORM_ROPE: {"alpha": quant.alpha_qkvg, **heads},
        QUANTIZE_Q: {"scale": quant.scale_q},
        QUANTIZE_KV: {"scale_k": quant.scale_k, "scale_v": quant.scale_v},
        SDPA: {
            "scale": geometry.scale / (quant.scale_q * quant.scale_k),
            "descale_v": 1.0 / quant.scale_v,
            "scale_o": quant.scale_o,
        },
        QUANTIZE_O: {"scale": quant.scale_o},
        OUT_PROJ: out_proj,
    }


def set_scalars(stages: Sequence[Stage], quant: Quant, geometry: GatedAttentionGeometry) -> None:
    """Gives every stage the scalars of ``quant``, which its next launch takes."""
    scalars = scalars_of(quant, geometry)
    for stage in stages:
        for name, value in scalars.get(stage.name, {}).items():
            setattr(stage, name, value)


def check_replaces(old: Quant | None, new: Quant) -> None:
    """ContractError unless ``new`` is valid and differs from ``old`` in its scales alone."""
    new.validate()
    fixed = {
        field.name: getattr(old, field.name)
        for field in dataclasses.fields(new)
        if field.name in _FIXED_FIELDS and hasattr(old, field.name)
    }
    if type(old) is not type(new) or dataclasses.replace(new, **fixed) != new:
        raise ContractError("quant", f"{old} with other scales", new)


def _spellings(code_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    return (code_dtype,) if code_dtype == E4M3 else (code_dtype, _PACKED)


def _dtype_among(
    name: str, specs: Mapping[str, TensorSpec], allowed: tuple[torch.dtype, ...]
) -> torch.dtype:
    dtype = specs[name].dtype
    if dtype not in allowed:
        raise ContractError(name, f"dtype {' or '.join(map(str, allowed))}", dtype)
    return dtype
