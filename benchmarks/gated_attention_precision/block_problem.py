# SPDX-License-Identifier: Apache-2.0
"""One layer of gated attention in codes: operands, the same in BF16, bytes and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from benchmarks.gated_attention_block import data
from benchmarks.gated_attention_block.block_problem import LIMIT, BlockProblem
from benchmarks.gated_attention_block.sampled import near
from benchmarks.harness.arm import Role
from cudnn_blocks import MxQuantSpec, QuantSpec
from cudnn_blocks.blocks import UNIT_SPECS, block_samples
from cudnn_blocks.blocks.gated_attention_precision import block_formats
from cudnn_blocks.quant_spec import E4M3
from cudnn_blocks.reference.gated_attention_precision import values_of

if TYPE_CHECKING:
    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.harness.arm import Arm
    from cudnn_blocks import TensorSpec
    from cudnn_blocks.quant_spec import BlockFormat

H_SCALE, SCALE_QKV, SCALE_O = 64.0, 32.0, 64.0
"""Powers of two, so that BF16 holds the values of codes."""
E2M1_DEVIATION = 2.9
"""Of all sixteen codes alike."""
FUSED_SUFFIX, FAST_SUFFIX = "-fused", "-fast"
LIMITS = {"nvfp4-output": 0.25, "mxfp4-output": 0.3}
"""Of a row's error over the row's norm, against the exact layer."""
CODES_LIMIT = 0.12


@dataclass(frozen=True)
class PrecisionBlockProblem(BlockProblem):
    """A prefill of one sequence in codes."""

    precision: str
    """Name of a spec, with a suffix where both fusions are on, then one for fast accumulation."""

    @property
    @override
    def name(self) -> str:
        """The middle words of a row."""
        return f"{self.model}/{self.precision}"

    @property
    def is_fused(self) -> bool:
        """Both knobs are on."""
        return self.precision.removesuffix(FAST_SUFFIX).endswith(FUSED_SUFFIX)

    @property
    def kind(self) -> str:
        """Name of the spec."""
        return self.precision.removesuffix(FAST_SUFFIX).removesuffix(FUSED_SUFFIX)

    @property
    def quant(self) -> QuantSpec | MxQuantSpec:
        """The spec, with scales that fit the operands."""
        spec = UNIT_SPECS[self.kind]
        if self.precision.endswith(FAST_SUFFIX):
            spec = replace(spec, fast_accumulation=True)
        if isinstance(spec, QuantSpec):
            return replace(
                spec,
                descale_h=1 / H_SCALE,
                descale_w_qkvg=1 / weight_scale(self.geometry.d_model),
                descale_w_o=1 / weight_scale(self.geometry.attn_width),
                scale_q=SCALE_QKV,
                scale_k=SCALE_QKV,
                scale_v=SCALE_QKV,
                scale_o=SCALE_O,
            )
        if spec.o_fp4 is not None:
            return spec
        descale_w_o = 1 / weight_scale(self.geometry.attn_width)
        return replace(spec, descale_w_o=descale_w_o, scale_o=SCALE_O)

    @property
    def weight_bytes(self) -> int:
        """Both matrices and their scales."""
        samples = block_samples(self.geometry, 1, self.tokens, quant=self.quant)
        names = ("w_qkvg", "w_qkvg_sf", "w_o", "w_o_sf")
        found = (samples.get(f"sample_{name}") for name in names)
        return sum(one.dtype.itemsize * math.prod(one.shape) for one in found if one is not None)

    @property
    def bf16_weight_bytes(self) -> int:
        """Both matrices in BF16."""
        one = self.geometry
        return data.ELEMENT_BYTES * one.d_model * (one.n_qkvg + one.attn_width)

    @property
    @override
    def traffic_bytes(self) -> int:
        """Codes in, weights and their scales, tables, and BF16 out."""
        one = self.geometry
        hidden = (1 + data.ELEMENT_BYTES) * self.tokens * one.d_model
        small = data.ELEMENT_BYTES * data.small_elements(one, self.tokens)
        return self.weight_bytes + hidden + small

    @property
    @override
    def footprint_bytes(self) -> int:
        """Those of the BF16 block, beside which the codes are less."""
        return BlockProblem(self.model, self.geometry, self.tokens).footprint_bytes

    @override
    def make_set(self, device: str) -> Tensors:
        """Random operands in codes, the same values in BF16, the result poisoned."""
        one, quant = self.geometry, self.quant
        samples = block_samples(one, 1, self.tokens, quant=quant, device=device)
        buffers = {
            **data.small_operands(one, self.tokens, device),
            "out": data.poisoned(1, self.tokens, one.d_model, device=device),
        }
        stds = {"h": 1.0, "w_qkvg": one.d_model**-0.5, "w_o": one.attn_width**-0.5}
        for name, block in block_formats(quant).items():
            codes, std = samples[f"sample_{name}"], stds[name]
            if block is None:
                scale = 1 / getattr(quant, f"descale_{name}")
                values = torch.randn(codes.shape, device=device) * (std * scale)
                buffers[f"{name}_codes"] = values.to(E4M3)
                buffers[name] = buffers[f"{name}_codes"].to(data.DTYPE) / scale
            else:
                blob = samples[f"sample_{name}_sf"]
                own = random_codes(codes, blob, block, std)
                buffers[f"{name}_codes"], buffers[f"{name}_sf"] = own
                buffers[name] = values_of(*own, block)
        return buffers

    @override
    def difference(self, actual: torch.Tensor, wanted: torch.Tensor, arm: Arm) -> str | None:
        """Relative to the size of each row of the exact layer; BF16 is held to its own limit."""
        if arm.role is Role.PEER:
            return near(actual, wanted, LIMIT)
        return near(actual, wanted, LIMITS.get(self.kind, CODES_LIMIT))


def weight_scale(k: int) -> float:
    """Of weights whose deviation is ``k ** -0.5``: it brings them to about 2**5."""
    return 2.0 ** round(math.log2(32 * k**0.5))


def random_codes(
    codes: TensorSpec, blob: TensorSpec, block: BlockFormat, std: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, padding included, whose products deviate by about ``std``."""
    device = codes.device
    if block.code_dtype == E4M3:
        own, unit = (torch.randn(codes.shape, device=device) * 64).to(E4M3), 64.0
    else:
        bits = torch.randint(0, 256, codes.shape, dtype=torch.uint8, device=device)
        own, unit = bits, E2M1_DEVIATION
    exponent = round(math.log2(std / unit))
    powers = exponent + torch.randint(-1, 1, blob.shape, device=device)
    if block.scale_dtype == E4M3:
        return own, torch.exp2(powers.float()).to(E4M3)
    return own, (powers + 127).to(torch.uint8)
