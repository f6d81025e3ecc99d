# SPDX-License-Identifier: Apache-2.0
"""Quantisers and dequantisers in plain torch, at the rounding points of docs/quantize.md.

Tensors are ``[B, S, H, D]``; codes of e2m1 are ``[B, S, H, D / 2]``, two a byte. A blob holds one
F8_128x4 array per (b, h): of S rows and D / block scales, or of D rows and S / block scales where
blocks lie along S.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from cudnn_blocks.quant_spec import E2M1_X2, E4M3, BlockFormat
from cudnn_blocks.reference.scale_blobs import pack_scales, unpack_scales

LARGEST = {E4M3: 448.0, E2M1_X2: 6.0}
"""Largest magnitude of a code; what is larger saturates to it."""
SMALLEST_E4M3 = 2.0**-9
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_NAN = 0x7F
E8M0_NAN = 0xFF
E8M0_LARGEST = 0xFE


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """FP32 to e4m3, uint8: nearest, ties to even, saturating; every NaN becomes 0x7F."""
    codes = x.clamp(-LARGEST[E4M3], LARGEST[E4M3]).to(E4M3).view(torch.uint8)
    return torch.where(x.isnan(), E4M3_NAN, codes)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """FP32 to e2m1, one a byte: nearest, ties to even, saturating; no NaN among ``x``."""
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for lower, (low, high) in enumerate(itertools.pairwise(E2M1_VALUES)):
        middle = (low + high) / 2
        code += magnitude >= middle if lower % 2 else magnitude > middle
    return code | (x.signbit().to(torch.uint8) << 3)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """One code a byte to two: the even one of a pair in the low nibble."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Two codes a byte to one."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def decode(codes: torch.Tensor, block: BlockFormat | None) -> torch.Tensor:
    """Codes to FP32, exactly; e4m3 where ``block`` is None."""
    if block is None or block.code_dtype == E4M3:
        return codes.view(E4M3).float()
    codes = unpack_e2m1(codes).int()
    values = torch.tensor(E2M1_VALUES, device=codes.device)[codes & 7]
    return torch.where(codes >= 8, -values, values)


def encode_scales(amax: torch.Tensor, block: BlockFormat) -> torch.Tensor:
    """The scale of blocks with these largest magnitudes, uint8; NaN gives the NaN code.

    E8M0: the smallest power of two, from 2**-127 to 2**127, that is at least
    ``amax * fp32(1 / largest)``. e4m3: ``max(amax * fp32(1 / 6), 2**-9)``, nearest, saturating.
    """
    one = torch.ones((), device=amax.device)
    scale = amax * (one / LARGEST[block.code_dtype])
    if block.scale_dtype == E4M3:
        return encode_e4m3(scale.clamp(min=SMALLEST_E4M3))
    bits = scale.view(torch.int32)
    power = torch.where(bits <= 0x400000, 0, (bits + 0x7FFFFF) >> 23).clamp(max=E8M0_LARGEST)
    return torch.where(scale.isnan(), E8M0_NAN, torch.where(scale.isinf(), E8M0_LARGEST, power)).to(
        torch.uint8
    )


def decode_scales(codes: torch.Tensor, block: BlockFormat) -> torch.Tensor:
    """Scale codes to FP32, exactly."""
    if block.scale_dtype == E4M3:
        return codes.view(torch.uint8).view(E4M3).float()
    byte = codes.view(torch.uint8).int()
    value = torch.where(byte == 0, 0x400000, byte << 23).view(torch.float32)
    return torch.where(byte == E8M0_NAN, torch.nan, value)


def quantize_fp8(x: torch.Tensor, codes: torch.Tensor, scale: float) -> None:
    """``codes = sat_e4m3(float(x) * scale)``, the product rounded to FP32."""
    factor = torch.tensor(scale, dtype=torch.float32, device=x.device)
    codes.view(torch.uint8).copy_(encode_e4m3(x.float() * factor))


def dequantize_fp8(codes: torch.Tensor, y: torch.Tensor, descale: float) -> None:
    """``y = sat_bf16(float(codes) * descale)``, the product rounded to FP32."""
    factor = torch.tensor(descale, dtype=torch.float32, device=y.device)
    y.copy_(_saturated(decode(codes, None) * factor))


def quantize_block(
    x: torch.Tensor,
    codes: torch.Tensor,
    blob: torch.Tensor,
    block: BlockFormat,
    *,
    along_tokens: bool = False,
    seq_lens: torch.Tensor | None = None,
) -> None:
    """Codes and scales of every block of ``x``.

    Args:
        x: ``[B, S, H, D]``, BF16 or FP16.
        codes: to write.
        blob: uint8 or the scale dtype, contiguous, all of its bytes written.
        block: format.
        along_tokens: blocks of S instead of D; S may end within a block.
        seq_lens: ``[B]``; tokens from there on count as 0 and get code 0.
    """
    values = x.float()
    if seq_lens is not None:
        is_valid = torch.arange(x.shape[1], device=x.device) < seq_lens[:, None]
        values = values.where(is_valid[:, :, None, None], 0.0)
    blocked = _split_blocks(values, block, along_tokens)
    scales = encode_scales(blocked.abs().amax(-1), block)
    divisor = decode_scales(scales, block)[..., None]
    is_nan = divisor.isnan()
    quotient = torch.where(is_nan, 0.0, blocked / divisor)
    encode = encode_e4m3 if block.code_dtype == E4M3 else encode_e2m1
    flat = _merge_blocks(encode(quotient), along_tokens, x.shape[1])
    codes.view(torch.uint8).copy_(flat if block.codes_per_byte == 1 else pack_e2m1(flat))
    blob.view(torch.uint8).copy_(pack_scales(scales).view(blob.shape))


def dequantize_block(
    codes: torch.Tensor,
    blob: torch.Tensor,
    y: torch.Tensor,
    block: BlockFormat,
    *,
    along_tokens: bool = False,
) -> None:
    """``y = sat_bf16(code * scale)``: exact wherever BF16 holds the product."""
    values = _split_blocks(decode(codes, block), block, along_tokens)
    b, h, rows, scales, _ = values.shape
    blobs = blob.view(torch.uint8).view(b, h, -1)
    scale = decode_scales(unpack_scales(blobs, rows, scales).contiguous(), block)
    y.copy_(_saturated(_merge_blocks(values * scale[..., None], along_tokens, y.shape[1])))


def _split_blocks(x: torch.Tensor, block: BlockFormat, along_tokens: bool) -> torch.Tensor:
    """``[B, H, S, D / block, block]``, or ``[B, H, D, S / block, block]``, S filled with zeros."""
    heads = x.transpose(1, 2)
    if along_tokens:
        heads = F.pad(heads.transpose(2, 3), (0, -x.shape[1] % block.block_size))
    blocked: torch.Tensor = heads.unflatten(-1, (-1, block.block_size))
    return blocked


def _merge_blocks(x: torch.Tensor, along_tokens: bool, tokens: int) -> torch.Tensor:
    """``[B, S, H, D]`` again."""
    heads = x.flatten(-2)
    if along_tokens:
        heads = heads[..., :tokens].transpose(2, 3)
    return heads.transpose(1, 2)


def _saturated(x: torch.Tensor) -> torch.Tensor:
    """What is beyond BF16's largest becomes it; NaN stays."""
    largest = torch.finfo(torch.bfloat16).max
    return x.clamp(-largest, largest)
