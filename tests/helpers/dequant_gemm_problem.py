# SPDX-License-Identifier: Apache-2.0
"""Operands of one product with block-scaled weights, and what has to come out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from cudnn_blocks import DequantGemm
from cudnn_blocks.quant_spec import BLOCK_FORMATS, E4M3, E8M0, BlockFormat
from cudnn_blocks.reference.dequant_gemm import dequant_gemm
from cudnn_blocks.reference.scale_blobs import pack_scales
from tests.helpers.gemm_problem import pitched

E8M0_NAN = 0xFF


@dataclass(frozen=True)
class DequantGemmProblem:
    """One call; with ``exact`` data every sum is exact in FP32."""

    operands: dict[str, torch.Tensor | None]
    w_format: str
    x_format: str | None = None
    alpha: float = 0.5

    def plan(self, **knobs: Any) -> DequantGemm:
        samples = {f"sample_{name}": tensor for name, tensor in self.operands.items()}
        options = {"w_format": self.w_format, "x_format": self.x_format, "alpha": self.alpha}
        return DequantGemm(**{**samples, **options, **knobs})

    def with_(self, **operands: torch.Tensor | None) -> DequantGemmProblem:
        return replace(self, operands={**self.operands, **operands})

    def expected(self) -> torch.Tensor:
        x, w, w_sf, y, x_sf = self.operands.values()
        assert x is not None
        assert w is not None
        assert w_sf is not None
        assert y is not None
        done = torch.empty_like(y)
        x_format = None if self.x_format is None else BLOCK_FORMATS[self.x_format]
        w_format = BLOCK_FORMATS[self.w_format]
        dequant_gemm(x, x_sf, w, w_sf, done, self.alpha, x_format, w_format)
        return done

    def run(self, **knobs: Any) -> torch.Tensor:
        plan = self.plan(**knobs)
        plan.compile()
        y = self.operands["y"]
        assert y is not None
        workspace = torch.full((plan.get_workspace_size(),), 0xFF, dtype=torch.uint8).to(y.device)
        plan.execute(**self.operands, workspace=workspace)
        return y


def make_codes(
    rows: int, k: int, block: BlockFormat, data: str, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, their scales ``[rows, K / block]`` and the blob of those, its padding NaN."""
    codes = torch.randint(0, 256, (rows, k // block.codes_per_byte), dtype=torch.uint8)
    if block.code_dtype == E4M3:
        codes = torch.randint(-4, 5, (rows, k)).float().to(E4M3).view(torch.uint8)
    shape = (rows, k // block.block_size)
    if block.scale_dtype == E8M0:
        low, high = (126, 129) if data == "exact" else (115, 128)
        scales = torch.randint(low, high, shape, dtype=torch.uint8)
    else:
        exact = torch.tensor([0.5, 1.0, 1.5, 2.0]).to(E4M3).view(torch.uint8)
        scales = exact[torch.randint(0, 4, shape)]
        if data != "exact":
            scales = torch.randint(1, 0x70, shape, dtype=torch.uint8)
    return codes.to(device), scales.to(device), poisoned_blob(scales).to(device)


def poisoned_blob(scales: torch.Tensor) -> torch.Tensor:
    """The blob of ``[R, C]`` scales with NaN codes of either kind for padding."""
    blob, is_scale = pack_scales(scales), pack_scales(torch.ones_like(scales))
    return torch.where(is_scale == 1, blob, torch.full_like(blob, E8M0_NAN))


def make_dequant_gemm(
    w_format: str,
    shape: tuple[int, int, int, int] = (2, 5, 136, 96),
    *,
    x_format: str | None = None,
    data: str = "exact",
    pads: tuple[int, int] = (0, 0),
    device: torch.device | str = "cpu",
) -> DequantGemmProblem:
    """Operands.

    Args:
        w_format: name of a block format.
        shape: B, S, N, K.
        x_format: the same of x, or None for BF16.
        data: ``exact`` or ``normal``.
        pads: elements between the rows of a BF16 x and of y.
        device: of every operand.
    """
    b, s, n, k = shape
    w, _, w_sf = make_codes(n, k, BLOCK_FORMATS[w_format], data, device)
    x_sf = None
    if x_format is None:
        x = pitched((b, s, k), pads[0], torch.bfloat16, device)
        x.copy_(torch.randint(-3, 4, x.shape) if data == "exact" else torch.randn(x.shape))
    else:
        x, _, x_sf = make_codes(b * s, k, BLOCK_FORMATS[x_format], data, device)
        x = x.view(b, s, -1)
    y = pitched((b, s, n), pads[1], torch.bfloat16, device)
    return DequantGemmProblem(
        {"x": x, "w": w, "w_sf": w_sf, "y": y, "x_sf": x_sf}, w_format, x_format
    )
