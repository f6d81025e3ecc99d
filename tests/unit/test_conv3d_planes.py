# SPDX-License-Identifier: Apache-2.0
"""What the Conv3D reference writes, what it leaves alone, and what it refuses before writing."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks.errors import ContractError
from cudnn_blocks.reference.conv3d import (
    conv3d_bias_residual_pad,
    conv3d_raw,
    conv3d_rmsnorm_silu,
    conv3d_rmsnorm_silu_pad,
)
from cudnn_blocks.reference.conv3d_cache import rmsnorm_silu_pad
from cudnn_blocks.reference.conv3d_frame import normalize_activate
from cudnn_blocks.reference.conv3d_packing import pack_conv3d_weight

CI, CO = 16, 24


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan).bfloat16()


X = randn(2, 5, 6, 7, CI)
PACKED = pack_conv3d_weight(randn(CO, CI, 3, 3, 3, seed=1))
BIAS, GAMMA, SKIP_BIAS = randn(CO, seed=2), randn(CO, seed=3), randn(CO, seed=4)
RESIDUAL = randn(2, 3, 4, 5, CO, seed=5)


def fused(x: torch.Tensor = X, residual: bool = False) -> torch.Tensor:
    n, t, h, w, _ = x.shape
    output = poison(n, t - 2, h - 2, w - 2, CO)
    skip = (RESIDUAL, SKIP_BIAS, poison(*RESIDUAL.shape)) if residual else ()
    conv3d_rmsnorm_silu(x, PACKED, BIAS, GAMMA, output, *skip)
    return output


def border_mask(padded: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(padded.shape[:4], dtype=torch.bool)
    mask[:, :, 1:-1, 1:-1] = False
    return mask


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("history_frames", [0, 1, 2])
def test_fused_pad_zeroes_borders_and_leaves_history_interiors(history_frames, residual):
    padded, cache = poison(2, 5, 6, 7, CO), poison(2, 2, 4, 5, CO)
    residual_output = poison(*RESIDUAL.shape)
    skip = (RESIDUAL, SKIP_BIAS, residual_output) if residual else ()
    conv3d_rmsnorm_silu_pad(
        X, PACKED, BIAS, GAMMA, padded, cache, *skip, history_frames=history_frames
    )
    expected = fused(residual=residual)
    first = 2 - history_frames
    assert not padded[border_mask(padded)].any()  # NaN counts as True
    assert not padded[:, :first].any()
    assert padded[:, first:2, 1:-1, 1:-1].isnan().all()
    assert torch.equal(padded[:, 2:, 1:-1, 1:-1], expected)
    assert torch.equal(cache, expected[:, -2:])
    assert residual_output.isnan().all() != residual


@pytest.mark.parametrize(("history_frames", "kept"), [(0, 1), (1, 2), (2, 2)])
def test_one_frame_leaves_the_older_cache_frame_to_the_caller(history_frames, kept):
    x = X[:, :3].contiguous()
    padded, cache = poison(2, 3, 6, 7, CO), poison(2, kept, 4, 5, CO)
    conv3d_rmsnorm_silu_pad(x, PACKED, BIAS, GAMMA, padded, cache, history_frames=history_frames)
    assert torch.equal(cache[:, -1], fused(x)[:, 0])
    assert cache[:, :-1].isnan().all()


@pytest.mark.parametrize("history_frames", [1, 2])
def test_history_copied_before_or_after_gives_the_same_bits(history_frames):
    history = randn(2, history_frames, 4, 5, CO, seed=6)
    results = []
    for copy_first in (True, False):
        padded, cache = poison(2, 3, 6, 7, CO), poison(2, 2, 4, 5, CO)

        def copy(padded=padded, cache=cache):
            padded[:, 2 - history_frames : 2, 1:-1, 1:-1] = history
            cache[:, :1] = history[:, -1:]

        if copy_first:
            copy()
        conv3d_rmsnorm_silu_pad(
            X[:, :3].contiguous(), PACKED, BIAS, GAMMA, padded, cache, history_frames=history_frames
        )
        if not copy_first:
            copy()
        results.append((padded, cache))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not results[0][0].isnan().any()


def test_bias_residual_pad_zeroes_the_bottom_row_and_right_column_only():
    padded = poison(2, 3, 5, 6, CO)
    conv3d_bias_residual_pad(X, PACKED, BIAS, RESIDUAL, padded, SKIP_BIAS)
    value = poison(*RESIDUAL.shape)
    conv3d_rmsnorm_silu(X, PACKED, BIAS, GAMMA, poison(*RESIDUAL.shape), RESIDUAL, SKIP_BIAS, value)
    assert torch.equal(padded[:, :, :-1, :-1], value)
    assert not padded[:, :, -1].any()
    assert not padded[:, :, :, -1].any()


@pytest.mark.parametrize("frames", [1, 2, 3])
@pytest.mark.parametrize("history", [0, 1, 2])
def test_standalone_norm_copies_history_and_keeps_the_last_frames(frames, history):
    x = RESIDUAL[:, :frames].contiguous()
    previous = randn(2, history, 4, 5, CO, seed=6) if history else None
    kept = min(2, frames + history)
    padded, cache = poison(2, frames + 2, 6, 7, CO), poison(2, kept, 4, 5, CO)
    rmsnorm_silu_pad(x, GAMMA, padded, cache, previous=previous)
    activated = normalize_activate(x, GAMMA)
    stream = activated if previous is None else torch.cat([previous, activated], 1)
    assert not padded[border_mask(padded)].any()
    assert not padded[:, : 2 - history].any()
    assert torch.equal(padded[:, 2 - history :, 1:-1, 1:-1], stream)
    assert torch.equal(cache, stream[:, -kept:])


def test_standalone_norm_adds_and_saves_at_the_rounding_points():
    x, shape = randn(2, 3, 4, 5, CO, seed=7), RESIDUAL.shape
    main = (x.float() + BIAS.float()).bfloat16()
    skip = (RESIDUAL.float() + SKIP_BIAS.float()).bfloat16()
    for operands, value in (
        ((BIAS, None, None, None), main),
        ((None, None, None, None), x),
        ((BIAS, None, RESIDUAL, SKIP_BIAS), (main.float() + skip.float()).bfloat16()),
        ((None, None, RESIDUAL, None), (x.float() + RESIDUAL.float()).bfloat16()),
    ):
        padded, cache, saved = poison(2, 5, 6, 7, CO), poison(2, 2, 4, 5, CO), poison(*shape)
        rmsnorm_silu_pad(x, GAMMA, padded, cache, *operands, saved)
        assert torch.equal(saved, value)
        assert torch.equal(padded[:, 2:, 1:-1, 1:-1], normalize_activate(saved, GAMMA))


@pytest.mark.parametrize("hint", [1, 2])
def test_hinted_planes_are_never_read_and_count_as_zero(hint):
    zeroed, unread = X.clone(), X.clone()
    zeroed[:, :hint], unread[:, :hint] = 0, torch.nan
    shape = (2, 3, 4, 5, CO)

    def run(x: torch.Tensor, knob: int) -> list[torch.Tensor]:
        out = [poison(*shape) for _ in range(4)]
        padded, cache, spatial = (
            poison(2, 5, 6, 7, CO),
            poison(2, 2, 4, 5, CO),
            poison(2, 3, 5, 6, CO),
        )
        conv3d_raw(x, PACKED, out[0], zero_leading_frames=knob)
        conv3d_rmsnorm_silu(
            x, PACKED, BIAS, GAMMA, out[1], RESIDUAL, None, out[2], zero_leading_frames=knob
        )
        conv3d_rmsnorm_silu_pad(x, PACKED, BIAS, GAMMA, padded, cache, zero_leading_frames=knob)
        conv3d_bias_residual_pad(x, PACKED, BIAS, RESIDUAL, spatial, zero_leading_frames=knob)
        return [*out[:3], padded, cache, spatial]

    for hinted, plain in zip(run(unread, hint), run(zeroed, 0), strict=True):
        assert torch.equal(hinted, plain)


def test_an_empty_batch_writes_nothing_and_does_not_fail():
    x = X[:0]
    conv3d_raw(x, PACKED, poison(0, 3, 4, 5, CO))
    conv3d_rmsnorm_silu_pad(x, PACKED, BIAS, GAMMA, poison(0, 5, 6, 7, CO), poison(0, 2, 4, 5, CO))
    conv3d_bias_residual_pad(x, PACKED, BIAS, RESIDUAL[:0], poison(0, 3, 5, 6, CO))
    rmsnorm_silu_pad(RESIDUAL[:0], GAMMA, poison(0, 5, 6, 7, CO), poison(0, 2, 4, 5, CO))


def test_refusals_come_before_any_write():
    output, residual_output = poison(2, 3, 4, 5, CO), poison(*RESIDUAL.shape)
    padded, cache = poison(2, 5, 6, 7, CO), poison(2, 2, 4, 5, CO)
    pad = (X, PACKED, BIAS, GAMMA, padded, cache)
    for message, function, operands, knobs in (
        ("output: expected shape", conv3d_raw, (X, PACKED, padded), {}),
        ("input: expected dtype torch.bfloat16", conv3d_raw, (X.float(), PACKED, output), {}),
        ("input: expected .* >= 3", conv3d_raw, (X[:, :2], PACKED, output), {}),
        (
            "zero_leading_frames: .* got 3",
            conv3d_raw,
            (X, PACKED, output),
            {"zero_leading_frames": 3},
        ),
        ("gamma: expected shape", conv3d_rmsnorm_silu, (X, PACKED, BIAS, GAMMA[:8], output), {}),
        (
            "residual_output: expected a tensor",
            conv3d_rmsnorm_silu,
            (X, PACKED, BIAS, GAMMA, output, RESIDUAL),
            {},
        ),
        (
            "residual_bias: expected None",
            conv3d_rmsnorm_silu,
            (X, PACKED, BIAS, GAMMA, output, None, SKIP_BIAS),
            {},
        ),
        (
            "residual_output: expected None",
            conv3d_rmsnorm_silu_pad,
            pad,
            {"residual_output": residual_output},
        ),
        ("history_frames: .* got 3", conv3d_rmsnorm_silu_pad, pad, {"history_frames": 3}),
        (
            "previous: expected shape",
            rmsnorm_silu_pad,
            (RESIDUAL, GAMMA, padded, cache, None, X),
            {},
        ),
    ):
        with pytest.raises(ContractError, match=message):
            function(*operands, **knobs)
    for tensor in (output, residual_output, padded, cache):
        assert tensor.isnan().all()
