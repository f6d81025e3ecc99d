# SPDX-License-Identifier: Apache-2.0
"""Operands of one quantiser call, and what has to come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from cudnn_blocks import DequantizeBlock, QuantizeBlock, QuantizeFp8, TensorSpec
from cudnn_blocks.ops.quantize_family import scales_bytes
from cudnn_blocks.quant_spec import BLOCK_FORMATS, E4M3
from cudnn_blocks.reference import quantize as reference
from tests.helpers.tensors import clone_exact

BF16, FP16 = torch.bfloat16, torch.float16
Operands = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class QuantizeProblem:
    """One call; ``knobs`` are the class's keywords."""

    op: Callable[..., Any]
    operands: Operands
    knobs: dict[str, Any]

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.operands[name]
        assert tensor is not None, name
        return tensor

    @property
    def written(self) -> tuple[str, ...]:
        return tuple(name for name in self.operands if name in WRITTEN[self.op])

    def plan(self, **knobs: Any) -> Any:
        samples = {f"sample_{name}": tensor for name, tensor in self.operands.items()}
        return self.op(**samples, **self.knobs, **knobs)

    def run(self, plan: Any = None) -> QuantizeProblem:
        if plan is None:
            plan = self.plan()
            plan.compile()
        plan.execute(**self.operands)
        return self

    def with_(self, **operands: torch.Tensor | None) -> QuantizeProblem:
        return replace(self, operands={**self.operands, **operands})

    def expected(self) -> QuantizeProblem:
        """By the reference, on the CPU."""
        operands = {
            name: None if t is None else clone_exact(t.cpu()) for name, t in self.operands.items()
        }
        done = replace(self, operands=operands)
        heads = {name: as_heads(t) for name, t in operands.items() if t is not None}
        if self.op is QuantizeFp8:
            reference.quantize_fp8(heads["x"], heads["codes"], self.knobs["scale"])
            return done
        block = BLOCK_FORMATS[self.knobs["fmt"]]
        along_tokens = self.knobs.get("along_tokens", False)
        codes, scales = heads["codes"], operands["scales"]
        assert scales is not None
        if self.op is QuantizeBlock:
            lens = operands["seq_lens"]
            reference.quantize_block(
                heads["x"], codes, scales, block, along_tokens=along_tokens, seq_lens=lens
            )
        else:
            reference.dequantize_block(codes, scales, heads["y"], block, along_tokens=along_tokens)
        return done


WRITTEN = {QuantizeFp8: ("codes",), QuantizeBlock: ("codes", "scales"), DequantizeBlock: ("y",)}


def as_heads(x: torch.Tensor) -> torch.Tensor:
    """Rows as the one head of one batch entry."""
    return x if x.dim() != 2 else x[None, :, None]


def make_values(
    shape: tuple[int, ...],
    dtype: torch.dtype = BF16,
    device: torch.device | str = "cpu",
    *,
    is_wild: bool = False,
) -> torch.Tensor:
    """Groups of eight at many magnitudes, zeros among them, in a wider array.

    Wild ones are any patterns, a few of them NaN or infinite.
    """
    *outer, width = shape
    if is_wild:
        values = torch.randint(-(2**15), 2**15, shape, dtype=torch.int32).to(torch.int16)
        values = values.view(dtype)
        values[~values.isfinite() & (torch.rand(shape) < 0.98)] = 0.25
    else:
        steps = torch.randint(-3, 4, (*outer, -(-width // 8))).repeat_interleave(8, -1)
        values = torch.randn(shape) * torch.exp2(8.0 * steps[..., :width])
        values[torch.rand(shape) < 0.1] = 0
        values[::3, ..., :32] = 0
    heads = outer[2] if len(shape) == 4 else 1
    wide = torch.full((*outer[:2], heads * width + 24), 3.0).to(device, dtype)
    band = wide[..., : heads * width]
    view = band if len(shape) == 2 else band.unflatten(-1, (heads, width))
    return view.copy_(values.to(device))


def make_fp8(
    shape: tuple[int, ...] = (2, 37, 3, 64),
    *,
    dtype: torch.dtype = BF16,
    scale: float = 0.37,
    device: torch.device | str = "cpu",
    is_wild: bool = False,
) -> QuantizeProblem:
    x = make_values(shape, dtype, device, is_wild=is_wild)
    codes = torch.zeros(shape, dtype=torch.uint8, device=device).view(E4M3)
    return QuantizeProblem(QuantizeFp8, {"x": x, "codes": codes}, {"scale": scale})


def make_blocks(
    fmt: str,
    shape: tuple[int, ...] = (2, 37, 3, 64),
    *,
    along_tokens: bool = False,
    seq_lens: list[int] | None = None,
    device: torch.device | str = "cpu",
    is_wild: bool = False,
) -> QuantizeProblem:
    """Blobs and codes are poisoned."""
    block = BLOCK_FORMATS[fmt]
    x = make_values(shape, BF16, device, is_wild=is_wild)
    codes = torch.full(
        (*shape[:-1], shape[-1] // block.codes_per_byte), 0xA5, dtype=torch.uint8, device=device
    )
    if block.code_dtype == E4M3:
        codes = codes.view(E4M3)
    size = scales_bytes(shape, block, along_tokens)
    scales = torch.full((size,), 0xA5, dtype=torch.uint8, device=device).view(block.scale_dtype)
    lens = None
    if seq_lens is not None:
        lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    operands = {"x": x, "codes": codes, "scales": scales, "seq_lens": lens}
    return QuantizeProblem(QuantizeBlock, operands, {"fmt": fmt, "along_tokens": along_tokens})


def make_codes(
    fmt: str,
    shape: tuple[int, ...] = (2, 37, 3, 64),
    *,
    along_tokens: bool = False,
    device: torch.device | str = "cpu",
) -> QuantizeProblem:
    """Any codes and scales, NaN among them."""
    problem = make_blocks(fmt, shape, along_tokens=along_tokens, device=device)
    for name in ("codes", "scales"):
        raw = problem[name].view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8).to(device))
    if fmt == "nvfp4":  # scales have no sign
        problem["scales"].view(torch.uint8).bitwise_and_(0x7F)
    y = torch.full(shape, 7.0, dtype=BF16, device=device)
    operands = {"codes": problem["codes"], "scales": problem["scales"], "y": y}
    return QuantizeProblem(DequantizeBlock, operands, problem.knobs)


def spec_fp8(shape: tuple[int, ...], dtype: torch.dtype = BF16, **knobs: Any) -> QuantizeFp8:
    """A plan without tensors."""
    x, codes = (TensorSpec.contiguous(shape, of) for of in (dtype, E4M3))
    return QuantizeFp8(x, codes, scale=1.0, **knobs)


def spec_blocks(
    fmt: str, shape: tuple[int, ...], *, is_back: bool = False, **knobs: Any
) -> QuantizeBlock | DequantizeBlock:
    """A plan without tensors."""
    block = BLOCK_FORMATS[fmt]
    width = shape[-1] // block.codes_per_byte
    dtype = E4M3 if block.code_dtype == E4M3 else torch.uint8
    values = TensorSpec.contiguous(shape, BF16)
    codes = TensorSpec.contiguous((*shape[:-1], width), dtype)
    size = scales_bytes(shape, block, knobs.get("along_tokens", False))
    scales = TensorSpec.contiguous((size,), torch.uint8)
    if is_back:
        return DequantizeBlock(codes, scales, values, fmt=fmt, **knobs)
    return QuantizeBlock(values, codes, scales, fmt=fmt, **knobs)


def same_numbers(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Where two BF16 tensors have the same bits, or are both NaN."""
    same = actual.cpu().view(torch.int16) == expected.cpu().view(torch.int16)
    return same | (actual.cpu().isnan() & expected.cpu().isnan())
