# SPDX-License-Identifier: Apache-2.0
"""Field cases S11, S12, S13 and whole streaming workflows, on classes and functions."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import (
    CausalConv3dWithCache,
    Conv3dRmsNormSilu,
    RmsNormSiluPad,
    ops,
    pack_causal_conv3d_weight,
    pack_conv3d_weight,
)
from tests.helpers.tensors import assert_same_bits

BF16 = torch.bfloat16
SPLITS = ([6], [1, 4, 1], [2, 3, 1], [1] * 6)
H, W, C = 5, 4, 160


def integers(*shape, device):
    return torch.randint(-3, 4, shape, device=device).to(BF16)


def poison(*shape, device):
    return torch.full(shape, torch.nan, dtype=BF16, device=device)


def stream_with_the_function(clip, packed, split):
    outputs, previous = [], None
    for chunk in clip.split(split, dim=2):
        results = ops.causal_conv3d_with_cache(chunk, packed, previous=previous)
        outputs.append(results["output"])
        previous = results["cache_output"]
    return torch.cat(outputs, 1), previous


def stream_with_the_class(clip, packed, split):
    """One plan per number of history frames, built for the longest chunk; smaller ones fit in."""
    n, longest, device = clip.shape[0], max(split), clip.device
    plans = {}
    outputs, previous = [], None
    for chunk in clip.split(split, dim=2):
        t, history = chunk.shape[2], 0 if previous is None else previous.shape[1]
        kept = min(2, longest + history)
        if history not in plans:
            sample = clip[:, :, :longest]
            old = None if not history else poison(n, history, H, W, 12, device=device)
            plan = CausalConv3dWithCache(
                sample,
                packed,
                poison(n, longest + 2, H + 2, W + 2, 16, device=device),
                poison(n, kept, H, W, 12, device=device),
                poison(n, longest, H, W, C, device=device),
                old,
            )
            plan.compile()
            plans[history] = plan
        cache = poison(n, min(2, t + history), H, W, 12, device=device)
        output = poison(n, t, H, W, C, device=device)
        padded = poison(n, t + 2, H + 2, W + 2, 16, device=device)
        plans[history].execute(chunk, packed, padded, cache, output, previous)
        outputs.append(output)
        previous = cache
    return torch.cat(outputs, 1), previous


@pytest.mark.parametrize("stream", [stream_with_the_function, stream_with_the_class])
def test_every_split_of_a_clip_gives_the_same_bits(device, stream):
    clip = integers(2, 12, 6, H, W, device=device)
    packed = pack_causal_conv3d_weight(integers(C, 12, 3, 3, 3, device=device))
    whole, cache = stream(clip, packed, [6])
    assert whole.shape == (2, 6, H, W, C)
    for split in SPLITS[1:]:
        output, last = stream(clip, packed, split)
        assert_same_bits(output, whole, f"{split}")
        assert_same_bits(last, cache, f"cache of {split}")
    assert_same_bits(cache, clip[:, :, -2:].permute(0, 2, 3, 4, 1), "cache")


@pytest.mark.parametrize("split", SPLITS)
def test_a_clip_begins_with_two_zero_frames(device, split):
    weight = torch.zeros(C, 12, 3, 3, 3, dtype=BF16, device=device)
    weight[:, 0, 0, 1, 1] = 1
    packed = pack_causal_conv3d_weight(weight)
    clip = torch.ones(1, 12, 6, H, W, dtype=BF16, device=device)
    output, _ = stream_with_the_function(clip, packed, split)
    frames = torch.tensor([0, 0, 1, 1, 1, 1], dtype=BF16, device=device)
    assert_same_bits(output, frames.view(1, 6, 1, 1, 1).expand_as(output), "output")


def test_a_second_clip_starts_afresh(device):
    packed = pack_causal_conv3d_weight(integers(C, 12, 3, 3, 3, device=device))
    first, second = (integers(1, 12, 6, H, W, device=device) for _ in range(2))
    fresh, _ = stream_with_the_function(second, packed, [1, 4, 1])
    stream_with_the_function(first, packed, [2, 3, 1])
    again, _ = stream_with_the_function(second, packed, [1, 4, 1])
    assert_same_bits(again, fresh, "output")


def test_history_of_another_resolution_is_a_value_error(device):
    packed = pack_causal_conv3d_weight(integers(C, 12, 3, 3, 3, device=device))
    chunk = integers(1, 12, 1, H, W, device=device)
    for h, w in ((H + 1, W), (H, W + 1)):
        with pytest.raises(ValueError, match="^previous: expected shape"):
            ops.causal_conv3d_with_cache(
                chunk, packed, previous=integers(1, 2, h, w, 12, device=device)
            )


def rows(device):
    """A pixel each: zeros, 2^-40, 2^-60, one Inf among ordinary channels, ordinary."""
    values = torch.ones(5, C, device=device)
    values *= torch.tensor([0.0, 2.0**-40, 2.0**-60, 1.0, 1.0], device=device).unsqueeze(1)
    values[3, 7] = torch.inf
    return values.to(BF16).view(1, 1, 1, 5, C)


def assert_rows(activated):
    """S12; ``activated`` is [5, C]."""
    assert_same_bits(activated[0], torch.zeros(C, dtype=BF16), "the zero row")
    assert activated[1].unique().tolist() == [0.73046875]
    torch.testing.assert_close(
        activated[2].float(), torch.full((C,), 5.48e-6, device=activated.device), rtol=0.01, atol=0
    )
    assert activated[3, 7].isnan()
    assert activated[3, :7].eq(0).all()
    assert activated[3, 8:].eq(0).all()
    assert activated[4].unique().tolist() == [0.73046875]


def test_the_norm_has_a_floor_and_no_epsilon(device):
    gamma = torch.ones(C, dtype=BF16, device=device)
    x = rows(device)
    padded, cache = poison(1, 3, 3, 7, C, device=device), poison(1, 1, 1, 5, C, device=device)
    plan = RmsNormSiluPad(x, gamma, padded, cache)
    plan.compile()
    plan.execute(x, gamma, padded, cache)
    assert_rows(padded[0, 2, 1, 1:-1])
    assert_rows(cache[0, 0, 0])


def test_the_fused_norm_has_a_floor_and_no_epsilon(device):
    """The rows through a centre-tap identity, where the Inf meets zero weights: its row is NaN."""
    weight = torch.zeros(C, C, 3, 3, 3, dtype=BF16, device=device)
    weight[range(C), range(C), 1, 1, 1] = 1
    x = torch.zeros(1, 3, 3, 7, C, dtype=BF16, device=device)
    pixels = rows(device)[0, 0, 0]
    pixels[3] = 1
    x[0, 1, 1, 1:-1] = pixels
    gamma = torch.ones(C, dtype=BF16, device=device)
    bias = torch.zeros(C, dtype=BF16, device=device)
    activated = ops.conv3d_rmsnorm_silu(x, pack_conv3d_weight(weight), bias, gamma)["output"]
    assert_same_bits(activated[0, 0, 0, 0], torch.zeros(C, dtype=BF16), "the zero row")
    assert activated[0, 0, 0, 1].unique().tolist() == [0.73046875]
    assert activated[0, 0, 0, 3:].unique().tolist() == [0.73046875]
    torch.testing.assert_close(
        activated[0, 0, 0, 2].float(),
        torch.full((C,), 5.48e-6, device=device),
        rtol=0.01,
        atol=0,
    )


@pytest.mark.parametrize(("has_residual_bias", "expected"), [(False, 256.0), (True, 258.0)])
def test_the_stored_sum_is_rounded_where_the_contract_says(device, has_residual_bias, expected):
    """S13: a sum fused in FP32 would give 258, or 260."""
    weight = torch.zeros(C, C, 3, 3, 3, dtype=BF16, device=device)
    weight[:, 0, 1, 1, 1] = 1
    x = torch.zeros(1, 3, 3, 3, C, dtype=BF16, device=device)
    x[0, 1, 1, 1, 0] = 256
    ones = torch.ones(C, dtype=BF16, device=device)
    residual = torch.ones(1, 1, 1, 1, C, dtype=BF16, device=device)
    output, value = torch.full_like(residual, torch.nan), torch.full_like(residual, torch.nan)
    operands = (x, pack_conv3d_weight(weight), ones, ones, output, residual)
    plan = Conv3dRmsNormSilu(*operands, ones if has_residual_bias else None, value)
    plan.compile()
    plan.execute(*operands, ones if has_residual_bias else None, value)
    assert value.unique().tolist() == [expected]
    # Every channel is equal, so each normalises to 1 whatever the value.
    assert output.unique().tolist() == [0.73046875]


@pytest.mark.parametrize("split", SPLITS)
def test_a_chain_of_ops_streams_like_the_whole_clip(device, split):
    """Causal layer, norm-pad, fused convolution-norm-pad with a residual, each with its history."""
    clip = torch.randn(1, 12, 6, H, W, device=device).to(BF16)

    def normal(*shape):
        return torch.randn(shape, device=device).to(BF16)

    first = pack_causal_conv3d_weight((normal(C, 12, 3, 3, 3) / 18).to(BF16))
    second = pack_conv3d_weight((normal(C, C, 3, 3, 3) / 66).to(BF16))
    bias, gamma = normal(C), normal(C)

    def run(chunks):
        outputs, histories = [], [None, None, None]
        for chunk in chunks:
            frames, count = chunk.shape[2], 0 if histories[0] is None else histories[0].shape[1]
            raw = ops.causal_conv3d_with_cache(chunk, first, histories[0])
            mid = ops.rmsnorm_silu_pad(raw["output"], gamma, bias, previous=histories[1])
            last = ops.conv3d_rmsnorm_silu_pad(
                mid["padded_output"], second, bias, gamma, count, residual=raw["output"]
            )
            padded, cache = last["padded_output"], last["cache_output"]
            if count:
                old = histories[2]
                padded[:, 2 - count : 2, 1:-1, 1:-1] = old
                carried = max(cache.shape[1] - frames, 0)
                if carried:
                    cache[:, :carried] = old[:, -carried:]
            histories = [raw["cache_output"], mid["cache_output"], cache]
            outputs.append(ops.conv3d_raw(padded, second, zero_leading_frames=2 - count))
        return torch.cat(outputs, 1), histories

    whole, ends = run([clip])
    parts, part_ends = run(clip.split(split, 2))
    assert not whole.isnan().any()
    assert_same_bits(parts, whole, f"{split}")
    for a, b in zip(part_ends, ends, strict=True):
        assert_same_bits(a, b, "history")
