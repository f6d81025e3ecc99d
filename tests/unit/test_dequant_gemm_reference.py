# SPDX-License-Identifier: Apache-2.0
"""The reference of the product with block-scaled weights against loops over bytes and blobs."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.helpers.dequant_gemm_problem import make_dequant_gemm

BLOCK = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}


def weight_at(fmt: str, codes: np.ndarray, blob: np.ndarray, n: int, k: int) -> float:
    """One weight, by the formats' and the blob's definitions."""
    blocks = codes.shape[1] * (1 if fmt == "mxfp8" else 2) // BLOCK[fmt]
    row_tile, row, column = n // 128, n % 128, k // BLOCK[fmt]
    tile = row_tile * math.ceil(blocks / 4) + column // 4
    byte = blob[tile * 512 + row % 32 * 16 + row // 32 * 4 + column % 4 :][:1]
    scale_dtype = ml_dtypes.float8_e4m3fn if fmt == "nvfp4" else ml_dtypes.float8_e8m0fnu
    scale = float(byte.view(scale_dtype)[0])
    if fmt == "mxfp8":
        return float(codes[n, k : k + 1].view(ml_dtypes.float8_e4m3fn)[0]) * scale
    nibble = np.array([codes[n, k // 2] >> (4 * (k % 2)) & 15], dtype=np.uint8)
    return float(nibble.view(ml_dtypes.float4_e2m1fn)[0]) * scale


@pytest.mark.parametrize("fmt", BLOCK)
def test_equals_a_loop_over_bytes(fmt):
    problem = make_dequant_gemm(fmt, (1, 3, 136, 96))
    x, w, w_sf = (problem.operands[name] for name in ("x", "w", "w_sf"))
    codes, blob = w.numpy(), w_sf.numpy()
    weights = [[weight_at(fmt, codes, blob, n, k) for k in range(96)] for n in range(136)]
    expected = x.double() @ torch.tensor(weights, dtype=torch.float64).t() * problem.alpha
    assert torch.equal(problem.expected(), expected.bfloat16())


def test_codes_of_x_are_values():
    problem = make_dequant_gemm("mxfp4", (2, 3, 40, 64), x_format="mxfp8")
    x, x_sf = problem.operands["x"], problem.operands["x_sf"]
    rows, blob = x.view(6, 64).numpy(), x_sf.numpy()
    values = [[weight_at("mxfp8", rows, blob, m, k) for k in range(64)] for m in range(6)]
    plain = torch.tensor(values).bfloat16().view(2, 3, 64)
    one = make_dequant_gemm("mxfp4", (2, 3, 40, 64))
    one = one.with_(x=plain, w=problem.operands["w"], w_sf=problem.operands["w_sf"])
    assert torch.equal(problem.expected(), one.expected())
