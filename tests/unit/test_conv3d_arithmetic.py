# SPDX-License-Identifier: Apache-2.0
"""The Conv3D reference against independent arithmetic: FP64 loops, numpy rounding, torch.nn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cudnn_blocks.reference.conv3d import (
    conv3d_bias_residual_pad,
    conv3d_raw,
    conv3d_rmsnorm_silu,
)
from cudnn_blocks.reference.conv3d_cache import rmsnorm_silu_pad
from cudnn_blocks.reference.conv3d_frame import normalize_activate
from cudnn_blocks.reference.conv3d_packing import pack_conv3d_weight

BF16_HALF_ULP = 2.0**-8


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def integers(*shape: int, seed: int = 0, low: int = -3, high: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).bfloat16()


def raw(x: torch.Tensor, weight: torch.Tensor, **knobs: int) -> torch.Tensor:
    n, t, h, w, _ = x.shape
    output = torch.full((n, t - 2, h - 2, w - 2, weight.shape[0]), torch.nan).bfloat16()
    conv3d_raw(x, pack_conv3d_weight(weight), output, **knobs)
    return output


def torch_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """FP64 torch convolution, NTHWC in and out."""
    return F.conv3d(x.double().permute(0, 4, 1, 2, 3), weight.double()).permute(0, 2, 3, 4, 1)


def bf16(x: np.ndarray) -> np.ndarray:
    """Rounds finite FP32 to BF16, ties to even, by its bits and without torch."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def as_numpy(x: torch.Tensor) -> np.ndarray:
    return x.float().numpy()


def norm_silu_numpy(value: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    """The contract's chain for rows of ``[..., C]``, one rounding at a time."""
    f32 = np.float32
    norm = np.sqrt((value.astype(f32) ** 2).sum(-1, keepdims=True, dtype=f32))
    x = bf16(value / np.maximum(norm, f32(1e-12)))
    x = bf16(x * f32(np.sqrt(value.shape[-1])))
    x = bf16(x * gamma)
    return bf16(x / (f32(1) + np.exp(-x)))


def test_raw_against_a_direct_fp64_loop():
    x, weight = randn(1, 4, 4, 5, 3), randn(2, 3, 3, 3, 3, seed=1)
    output = raw(x, weight)
    xs, ws = x.double().numpy(), weight.double().numpy()
    for t, h, w, o in itertools.product(range(2), range(2), range(3), range(2)):
        exact = 0.0
        for a, b, c, i in itertools.product(range(3), range(3), range(3), range(3)):
            exact += xs[0, t + a, h + b, w + c, i] * ws[o, i, a, b, c]
        assert abs(output[0, t, h, w, o].item() - exact) <= BF16_HALF_ULP * abs(exact) + 1e-5


@pytest.mark.parametrize(
    ("shape", "co"),
    [
        ((1, 3, 3, 3, 160), 160),
        ((2, 4, 5, 4, 64), 8),
        ((1, 3, 7, 17, 24), 40),
        ((1, 5, 3, 33, 8), 16),
    ],
)
def test_integer_data_is_exact(shape, co):
    x = integers(*shape, low=-9, high=10)
    weight = integers(co, shape[-1], 3, 3, 3, seed=1, low=-9, high=10)
    exact = torch_conv(x, weight)
    assert exact.abs().max() > 256  # the one rounding to BF16 is exercised too
    assert torch.equal(raw(x, weight), exact.float().bfloat16())


def test_centre_tap_identity_copies_the_interior():
    weight = torch.zeros(160, 160, 3, 3, 3, dtype=torch.bfloat16)
    weight[range(160), range(160), 1, 1, 1] = 1
    x = randn(1, 4, 5, 6, 160)
    assert torch.equal(raw(x, weight), x[:, 1:-1, 1:-1, 1:-1])


def test_raw_is_rounded_once_from_fp32():
    x, weight = randn(1, 4, 8, 7, 160, scale=0.1), randn(160, 160, 3, 3, 3, seed=1, scale=0.1)
    exact = torch_conv(x, weight)
    error = (raw(x, weight).double() - exact).abs()
    assert (error <= BF16_HALF_ULP * exact.abs() + 1e-5).all()


def test_ambient_autocast_and_default_dtype_do_not_change_the_bits():
    x, weight = randn(1, 3, 4, 4, 160), randn(8, 160, 3, 3, 3, seed=1)
    gamma = randn(160, seed=2)
    plain, activated = raw(x, weight), normalize_activate(x, gamma)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            assert torch.equal(raw(x, weight), plain)
            assert torch.equal(normalize_activate(x, gamma), activated)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("channels", [8, 96, 160, 320, 640])
def test_norm_silu_against_numpy_rounding(channels):
    value, gamma = randn(1, 2, 3, 5, channels), randn(channels, seed=1)
    ours = as_numpy(normalize_activate(value, gamma))
    exact = norm_silu_numpy(as_numpy(value), as_numpy(gamma))
    # The FP32 sum and exp may differ in the last bit, which a later rounding can turn into one ulp.
    assert (ours == exact).mean() > 0.995
    np.testing.assert_allclose(ours, exact, rtol=2**-6, atol=1e-6)


def test_norm_silu_against_torch_nn():
    value, gamma = randn(2, 1, 4, 4, 160, scale=0.1), randn(160, seed=1)
    wide = F.normalize(value.double(), dim=-1, eps=1e-12) * 160**0.5 * gamma.double()
    ours = normalize_activate(value, gamma).double()
    torch.testing.assert_close(ours, F.silu(wide), atol=0.02, rtol=0.02)


def test_fused_chain_against_numpy_rounding():
    x, weight = integers(1, 3, 4, 5, 16), integers(32, 16, 3, 3, 3, seed=1)
    bias, gamma, residual_bias = randn(32, seed=2), randn(32, seed=3), randn(32, seed=4)
    residual = randn(1, 1, 2, 3, 32, seed=5, scale=100)
    output, residual_output = torch.empty_like(residual), torch.empty_like(residual)
    conv3d_rmsnorm_silu(
        x, pack_conv3d_weight(weight), bias, gamma, output, residual, residual_bias, residual_output
    )
    conv = bf16(torch_conv(x, weight).float().numpy())
    main = bf16(conv + as_numpy(bias))
    skip = bf16(as_numpy(residual) + as_numpy(residual_bias))
    value = bf16(main + skip)
    np.testing.assert_array_equal(as_numpy(residual_output), value)
    exact = norm_silu_numpy(value, as_numpy(gamma))
    np.testing.assert_allclose(as_numpy(output), exact, rtol=2**-6, atol=1e-6)


def test_fused_chain_against_an_eager_video_vae_block():
    x, weight = randn(1, 4, 6, 7, 160, scale=0.1), randn(160, 160, 3, 3, 3, seed=1, scale=0.1)
    bias, gamma = randn(160, seed=2, scale=0.1), randn(160, seed=3)
    output = torch.empty(1, 2, 4, 5, 160, dtype=torch.bfloat16)
    conv3d_rmsnorm_silu(x, pack_conv3d_weight(weight), bias, gamma, output)
    conv = F.conv3d(x.float().permute(0, 4, 1, 2, 3), weight.float(), bias.float())
    normalized = F.normalize(conv, dim=1) * 160**0.5 * gamma.float().view(-1, 1, 1, 1)
    eager = F.silu(normalized).permute(0, 2, 3, 4, 1)
    torch.testing.assert_close(output.float(), eager, atol=0.05, rtol=0.05)


def test_fused_equals_raw_followed_by_the_standalone_norm():
    x, weight = randn(2, 5, 5, 6, 24), randn(40, 24, 3, 3, 3, seed=1)
    bias, gamma = randn(40, seed=2), randn(40, seed=3)
    fused = torch.empty(2, 3, 3, 4, 40, dtype=torch.bfloat16)
    conv3d_rmsnorm_silu(x, pack_conv3d_weight(weight), bias, gamma, fused)
    padded = torch.empty(2, 5, 5, 6, 40, dtype=torch.bfloat16)
    cache = torch.empty(2, 2, 3, 4, 40, dtype=torch.bfloat16)
    rmsnorm_silu_pad(raw(x, weight), gamma, padded, cache, bias)
    assert torch.equal(padded[:, 2:, 1:-1, 1:-1], fused)
    assert torch.equal(cache, fused[:, -2:])


def test_norm_floor_is_a_maximum_and_not_an_added_epsilon():
    value = torch.zeros(3, 160, dtype=torch.bfloat16)
    value[1], value[2] = 2.0**-40, 2.0**-60
    rows = normalize_activate(value, torch.ones(160, dtype=torch.bfloat16))
    assert torch.equal(rows[0], torch.zeros_like(rows[0]))
    assert (rows[1] == 0.73046875).all()
    torch.testing.assert_close(rows[2].float(), torch.full((160,), 5.48e-6), rtol=2**-8, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_non_finite_value_stays_in_its_row(bad):
    value, gamma = randn(3, 5, 160), randn(160, seed=1)
    clean = normalize_activate(value, gamma)
    value[1, 2, 7] = bad
    dirty = normalize_activate(value, gamma)
    others = torch.ones(3, 5, dtype=torch.bool)
    others[1, 2] = False
    assert torch.equal(dirty[others], clean[others])
    row = dirty[1, 2].float()
    assert row[7].isnan()
    expected = torch.full_like(row, torch.nan) if bad != bad else torch.zeros_like(row)
    expected[7] = torch.nan
    torch.testing.assert_close(row, expected, equal_nan=True, rtol=0, atol=0)


def one_hot_256(residual_bias: float | None) -> tuple[torch.Tensor, ...]:
    """A convolution that gives 256 everywhere, bias 1 and residual 1."""
    x = torch.zeros(1, 3, 3, 3, 160, dtype=torch.bfloat16)
    x[..., 0] = 256
    weight = torch.zeros(160, 160, 3, 3, 3, dtype=torch.bfloat16)
    weight[:, 0, 1, 1, 1] = 1
    ones = torch.ones(160, dtype=torch.bfloat16)
    bias = None if residual_bias is None else ones * residual_bias
    return x, pack_conv3d_weight(weight), ones, bias


@pytest.mark.parametrize(("residual_bias", "stored"), [(None, 256), (1.0, 258)])
def test_residual_rounds_before_it_is_normalised(residual_bias, stored):
    x, packed, ones, skip_bias = one_hot_256(residual_bias)
    residual = torch.ones(1, 1, 1, 1, 160, dtype=torch.bfloat16)
    output, residual_output = torch.empty_like(residual), torch.empty_like(residual)
    conv3d_rmsnorm_silu(x, packed, ones, ones, output, residual, skip_bias, residual_output)
    assert (residual_output == stored).all()
    assert torch.equal(output, normalize_activate(residual_output, ones))
    padded = torch.full((1, 1, 2, 2, 160), torch.nan).bfloat16()
    conv3d_bias_residual_pad(x, packed, ones, residual, padded, skip_bias)
    assert (padded[:, :, 0, 0] == stored).all()


def test_a_single_frame_and_a_long_clip_take_the_same_arithmetic():
    x, weight = randn(2, 8, 6, 5, 160), randn(16, 160, 3, 3, 3, seed=1)
    whole = raw(x, weight)
    for n, t in itertools.product(range(2), range(6)):
        alone = raw(x[n : n + 1, t : t + 3].contiguous(), weight)
        assert torch.equal(alone[0, 0], whole[n, t])
