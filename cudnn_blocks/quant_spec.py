# SPDX-License-Identifier: Apache-2.0
"""Precision specs: static per-tensor scales, block-scaled modes, and the block formats themselves.

    x_real = x_code * descale        x_code = sat_e4m3(x_real * scale)        per tensor
    x_real = x_code * scale(block)                                            block-scaled

A spec can be built, printed and compared whatever its values; ``validate()`` judges them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from pydantic import InstanceOf

from cudnn_blocks.errors import ContractError, NotServedError
from cudnn_blocks.geometry.frozen import frozen

E4M3 = torch.float8_e4m3fn
E2M1_X2 = torch.float4_e2m1fn_x2
"""Two codes a byte, the low nibble the even one."""
E8M0 = torch.float8_e8m0fnu
MX_BLOCK = 32
"""Elements under one E8M0 scale."""

_SMALLEST_NORMAL, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
PER_TENSOR_SCALES = (
    "descale_h",
    "descale_w_qkvg",
    "descale_w_o",
    "scale_q",
    "scale_k",
    "scale_v",
    "scale_o",
)
"""Fields of ``QuantSpec`` that a plan may change, in their order."""
_UNUSED_WITH_O_FP4 = {"descale_w_o": 1.0, "scale_o": 1.0, "fast_accumulation": False}
"""Fields of ``MxQuantSpec`` to the values that they then have."""


@dataclass(frozen=True)
class BlockFormat:
    """Codes and the scale that ``block_size`` neighbours of them share."""

    name: str
    """``mxfp8``, ``mxfp4`` or ``nvfp4``."""
    code_dtype: torch.dtype
    scale_dtype: torch.dtype
    block_size: int

    @property
    def codes_per_byte(self) -> int:
        """2 where a byte holds two codes."""
        return 2 if self.code_dtype == E2M1_X2 else 1

    def __str__(self) -> str:
        return self.name


MXFP8 = BlockFormat("mxfp8", E4M3, E8M0, MX_BLOCK)
MXFP4 = BlockFormat("mxfp4", E2M1_X2, E8M0, MX_BLOCK)
NVFP4 = BlockFormat("nvfp4", E2M1_X2, E4M3, 16)
BLOCK_FORMATS = {block.name: block for block in (MXFP8, MXFP4, NVFP4)}
"""Every block format by its name."""


class Fp4Format(enum.Enum):
    """A format of e2m1 codes: each member is its codes, scale dtype and block size in one."""

    NVFP4 = NVFP4
    MXFP4 = MXFP4

    @property
    def fmt_name(self) -> str:
        """``nvfp4`` or ``mxfp4``."""
        return self.value.name

    @property
    def block_size(self) -> int:
        """Elements under one scale."""
        return self.value.block_size

    @property
    def sf_torch_dtype(self) -> torch.dtype:
        """Dtype of a scale."""
        return self.value.scale_dtype


@frozen
class QuantSpec:
    """Static scales of the per-tensor FP8 mode. Kernel arguments: a new value compiles nothing."""

    descale_h: float
    descale_w_qkvg: float
    descale_w_o: float
    scale_q: float
    scale_k: float
    scale_v: float
    scale_o: float
    """Of the gated attention output."""
    dtype: InstanceOf[torch.dtype] = E4M3
    """Of all codes."""
    fast_accumulation: bool = False
    """Permits sums of both projections at the tensor cores' precision; compiled in."""

    def validate(self) -> None:
        """Raises ContractError for a value outside the contract, NotServedError for E5M2."""
        _validate_codes("dtype", self.dtype, E4M3)
        for name in PER_TENSOR_SCALES:
            validate_scale(name, getattr(self, name))
        validate_scale("descale_h * descale_w_qkvg", self.alpha_qkvg)
        validate_scale("descale_w_o / scale_o", self.alpha_o)

    @property
    def alpha_qkvg(self) -> float:
        """Factor of the sums of the QKVG projection."""
        return self.descale_h * self.descale_w_qkvg

    @property
    def alpha_o(self) -> float:
        """Factor of the sums of the output projection."""
        return self.descale_w_o / self.scale_o


@frozen
class MxQuantSpec:
    """The block-scaled modes: MXFP8, with MXFP4 weights of the projection, with an FP4 output."""

    descale_w_o: float
    """Of a per-tensor e4m3 W_o; 1.0 with ``o_fp4``, whose W_o has scale blobs."""
    scale_o: float = 1.0
    """Of the gated attention output in per-tensor e4m3; 1.0 with ``o_fp4``."""
    dtype: InstanceOf[torch.dtype] = E4M3
    """Codes of h, Q, K and V."""
    block_size: int = MX_BLOCK
    """Elements under one scale of h, W_qkvg, Q, K and V."""
    w_qkvg_dtype: InstanceOf[torch.dtype] = E4M3
    """Codes of W_qkvg: ``torch.float8_e4m3fn`` or ``torch.float4_e2m1fn_x2``."""
    o_fp4: Fp4Format | None = None
    """Block-scaled e2m1 codes of the gated output and of W_o; None for per-tensor e4m3."""
    fast_accumulation: bool = False
    """Permits sums of the per-tensor e4m3 output projection at the tensor cores' precision; the
    other products are of values, in FP32 always. False with ``o_fp4``. Compiled in."""

    def validate(self) -> None:
        """Raises ContractError for a value outside the contract, NotServedError for E5M2."""
        _validate_codes("dtype", self.dtype, E4M3)
        _validate_codes("w_qkvg_dtype", self.w_qkvg_dtype, E4M3, E2M1_X2)
        if self.block_size != MX_BLOCK:
            raise ContractError("block_size", str(MX_BLOCK), self.block_size)
        for name in ("descale_w_o", "scale_o"):
            validate_scale(name, getattr(self, name))
        for name, neutral in _UNUSED_WITH_O_FP4.items() if self.o_fp4 is not None else ():
            value = getattr(self, name)
            if value != neutral:
                raise ContractError(name, f"{neutral} with o_fp4, where nothing consumes it", value)
        validate_scale("descale_w_o / scale_o", self.alpha_o)

    @property
    def w_qkvg_format(self) -> BlockFormat:
        """Codes and scales of W_qkvg."""
        return MXFP4 if self.w_qkvg_dtype == E2M1_X2 else MXFP8

    @property
    def alpha_o(self) -> float:
        """Factor of the sums of the output projection."""
        return self.descale_w_o / self.scale_o


def _validate_codes(name: str, dtype: torch.dtype, *served: torch.dtype) -> None:
    wanted = " or ".join(map(str, served))
    if dtype in (torch.float8_e5m2, torch.float8_e5m2fnuz):
        raise NotServedError("quant", f"{name}={dtype}", wanted)
    if dtype not in served:
        raise ContractError(name, wanted, dtype)


def validate_scale(name: str, value: float) -> None:
    """Raises ContractError for a scale that FP32 does not hold as a positive normal number."""
    if not _SMALLEST_NORMAL <= value <= _LARGEST:
        raise ContractError(name, "a positive normal FP32 number", value)
