# SPDX-License-Identifier: Apache-2.0
"""The reference of the sigmoid gate, and the kernels' formula of the sigmoid, against FP64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cudnn_blocks.reference.sigmoid_gate import sigmoid_gate
from tests.helpers.pointwise_problem import DTYPES, make_gate

dtypes = pytest.mark.parametrize("dtype", DTYPES)


@dtypes
def test_against_an_fp64_loop(dtype):
    problem = make_gate((1, 2, 3, 16), dtype=dtype)
    exact = [
        o / (1 + math.exp(-g))
        for o, g in zip(
            problem["o"].double().flatten().tolist(),
            problem["gate"].double().flatten().tolist(),
            strict=True,
        )
    ]
    expected = torch.tensor(exact, dtype=torch.float64).to(dtype)
    assert torch.equal(problem.expected().flatten(), expected)


def test_extremes():
    inf, nan = math.inf, math.nan
    rows = [  # o, gate, out
        (2.0, 0.0, 1.0),
        (2.0, inf, 2.0),
        (2.0, -inf, 0.0),
        (-2.0, -inf, -0.0),
        (inf, 1.0, inf),
        (inf, -inf, nan),
        (2.0, nan, nan),
        (nan, 0.0, nan),
        (0.0, 3e38, 0.0),
        (1.0, -3e38, 0.0),
        (1.0, 100.0, 1.0),
    ]
    columns = zip(*rows, strict=True)
    o, gate, expected = (torch.tensor(column, dtype=torch.bfloat16) for column in columns)
    out = torch.empty_like(o)
    sigmoid_gate(o, gate, out)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(out[3])


@dtypes
def test_in_place(dtype):
    problem = make_gate(dtype=dtype, in_place=True)
    expected = problem["o"].clone()
    sigmoid_gate(expected.clone(), problem["gate"], expected)
    assert torch.equal(problem.run()["o"], expected)


@dtypes
def test_the_formula_of_the_kernels_for_every_gate_value(dtype):
    """``stages/device/sigmoid.py``, its FP32 operations one by one.

    The hardware's exp2 and reciprocal add 2 ulp each, 5e-7.
    """
    pattern = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = pattern.view(dtype).float().numpy()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        e = np.exp2(x * np.float32(-1.4426950408889634))
        ours = np.float32(1) / (e + np.float32(1))
        exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    assert np.array_equal(np.isnan(ours), np.isnan(x))
    normal = np.abs(x) < 87
    relative = np.abs(ours - exact)[normal] / exact[normal]
    assert (relative < (3 + np.abs(x[normal])) * 8e-8).all()
    assert relative.max() < 4e-6
    assert np.abs(ours - exact)[x < -87].max() < 1e-37
    assert (ours[x > 87] == 1).all()
