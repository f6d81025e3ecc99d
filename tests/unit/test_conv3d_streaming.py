# SPDX-License-Identifier: Apache-2.0
"""Streaming with caches: a clip gives the same bits in any chunking."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cudnn_blocks.errors import ContractError
from cudnn_blocks.reference.conv3d import conv3d_rmsnorm_silu_pad
from cudnn_blocks.reference.conv3d_cache import causal_conv3d_with_cache, rmsnorm_silu_pad
from cudnn_blocks.reference.conv3d_packing import pack_causal_conv3d_weight, pack_conv3d_weight

SPLITS = [[6], [1, 4, 1], [2, 3, 1], [1] * 6]
H, W = 5, 4


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def poison(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan).bfloat16()


def causal(chunk, packed, previous=None, padded=None):
    n, _, t, h, w = chunk.shape
    history = 0 if previous is None else previous.shape[1]
    output, cache = poison(n, t, h, w, 160), poison(n, min(2, t + history), h, w, 12)
    causal_conv3d_with_cache(chunk, packed, padded, cache, output, previous)
    return output, cache


def stream(clip, packed, split, previous=None):
    outputs = []
    for chunk in clip.split(split, dim=2):
        output, previous = causal(chunk, packed, previous)
        outputs.append(output)
    return torch.cat(outputs, 1), previous


@pytest.mark.parametrize("make", [integers, randn])
def test_every_split_gives_the_same_bits(make):
    clip, packed = make(2, 12, 6, H, W), pack_causal_conv3d_weight(make(160, 12, 3, 3, 3, seed=1))
    whole, cache = stream(clip, packed, [6])
    assert whole.shape == (2, 6, H, W, 160)
    for split in SPLITS[1:]:
        output, last = stream(clip, packed, split)
        assert torch.equal(output, whole)
        assert torch.equal(last, cache)
    assert torch.equal(cache, clip[:, :, -2:].permute(0, 2, 3, 4, 1))


def test_causal_integer_data_is_exact():
    clip, weight = integers(1, 12, 4, H, W), integers(160, 12, 3, 3, 3, seed=1)
    output, _ = causal(clip, pack_causal_conv3d_weight(weight))
    exact = F.conv3d(F.pad(clip.double(), (1, 1, 1, 1, 2, 0)), weight.double())
    assert torch.equal(output, exact.permute(0, 2, 3, 4, 1).float().bfloat16())


@pytest.mark.parametrize("split", SPLITS)
def test_the_clip_begins_with_two_zero_frames(split):
    weight = torch.zeros(160, 12, 3, 3, 3, dtype=torch.bfloat16)
    weight[:, 0, 0, 1, 1] = 1
    clip = torch.ones(1, 12, 6, H, W, dtype=torch.bfloat16)
    output, _ = stream(clip, pack_causal_conv3d_weight(weight), split)
    frames = torch.tensor([0, 0, 1, 1, 1, 1]).bfloat16()
    assert torch.equal(output, frames.view(1, 6, 1, 1, 1).expand_as(output))


def test_a_second_clip_without_history_starts_afresh():
    packed = pack_causal_conv3d_weight(randn(160, 12, 3, 3, 3, seed=1))
    first, second = randn(1, 12, 6, H, W), randn(1, 12, 6, H, W, seed=2)
    fresh, _ = stream(second, packed, [1, 4, 1])
    stream(first, packed, [2, 3, 1])
    again, _ = stream(second, packed, [6])
    assert torch.equal(again, fresh)


def test_strided_chunks_equal_contiguous_ones():
    packed = pack_causal_conv3d_weight(randn(160, 12, 3, 3, 3, seed=1))
    frames = randn(1, 6, H, 2 * W, 12)  # decoded video: channels last, every other column
    strided = frames.permute(0, 4, 1, 2, 3)[..., ::2]
    assert not strided.is_contiguous()
    assert torch.equal(causal(strided, packed)[0], causal(strided.contiguous(), packed)[0])


@pytest.mark.parametrize("history", [0, 1, 2])
@pytest.mark.parametrize("frames", [1, 3])
def test_padded_input_is_written_whole(frames, history):
    packed = pack_causal_conv3d_weight(randn(160, 12, 3, 3, 3, seed=1))
    chunk = randn(2, 12, frames, H, W)
    previous = randn(2, history, H, W, 12, seed=2) if history else None
    padded = poison(2, frames + 2, H + 2, W + 2, 16)
    output, cache = causal(chunk, packed, previous, padded)
    body = chunk.permute(0, 2, 3, 4, 1)
    raw = body if previous is None else torch.cat([previous, body], 1)
    expected = torch.zeros_like(padded)
    expected[:, 2 - history :, 1:-1, 1:-1, :12] = raw
    assert torch.equal(padded, expected)
    assert torch.equal(cache, raw[:, -min(2, frames + history) :])
    assert torch.equal(output, causal(chunk, packed, previous)[0])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (1, 2, H + 1, W, 12),
            r"previous: expected shape \(1, 2, 5, 4, 12\), got \(1, 2, 6, 4, 12\)",
        ),
        (
            (1, 2, H, W + 1, 12),
            r"previous: expected shape \(1, 2, 5, 4, 12\), got \(1, 2, 5, 5, 12\)",
        ),
        ((2, 2, H, W, 12), r"previous: expected shape \(1, 2, 5, 4, 12\)"),
        ((1, 2, H, W, 16), r"previous: expected shape \(1, 2, 5, 4, 12\)"),
        ((1, 3, H, W, 12), r"previous: expected shape \[N, 1 or 2, H, W, C\]"),
    ],
)
def test_history_of_another_size_is_refused_before_any_write(shape, message):
    packed = pack_causal_conv3d_weight(randn(160, 12, 3, 3, 3, seed=1))
    output, cache = poison(1, 1, H, W, 160), poison(1, 2, H, W, 12)
    with pytest.raises(ContractError, match=message):
        causal_conv3d_with_cache(randn(1, 12, 1, H, W), packed, None, cache, output, poison(*shape))
    assert output.isnan().all()
    assert cache.isnan().all()


@pytest.mark.parametrize(
    ("operand", "shape"),
    [
        ("input", (1, 3, 1, H, W)),
        ("packed_weight", (160, 432)),
        ("padded_input", (1, 3, H, W, 16)),
        ("cache_output", (1, 2, H, W, 12)),
        ("output", (1, 1, H, W, 96)),
    ],
)
def test_causal_operands_of_a_wrong_shape_are_refused(operand, shape):
    operands = {
        "input": randn(1, 12, 1, H, W),
        "packed_weight": randn(160, 448),
        "padded_input": poison(1, 3, H + 2, W + 2, 16),
        "cache_output": poison(1, 1, H, W, 12),
        "output": poison(1, 1, H, W, 160),
    }
    causal_conv3d_with_cache(**operands)
    operands[operand] = poison(*shape)
    with pytest.raises(ContractError, match=f"{operand}: expected shape"):
        causal_conv3d_with_cache(**operands)


@pytest.mark.parametrize("split", SPLITS)
def test_a_padded_chain_streams_like_the_whole_clip(split):
    """Norm-pad, then fused convolution-norm-pad, each with a two-frame cache of its own."""
    channels = 16
    clip = randn(1, 6, H, W, channels)
    packed = pack_conv3d_weight(randn(channels, channels, 3, 3, 3, seed=1))
    bias, gamma = randn(channels, seed=2), randn(channels, seed=3)

    def run(chunks):
        outputs, old_a, old_b = [], None, None
        for x in chunks:
            t = x.shape[1]
            history = 0 if old_a is None else old_a.shape[1]
            kept = min(2, t + history)
            padded_a, new_a = (
                poison(1, t + 2, H + 2, W + 2, channels),
                poison(1, kept, H, W, channels),
            )
            rmsnorm_silu_pad(x, gamma, padded_a, new_a, previous=old_a)
            padded_b, new_b = torch.empty_like(padded_a), torch.empty_like(new_a)
            conv3d_rmsnorm_silu_pad(
                padded_a, packed, bias, gamma, padded_b, new_b, history_frames=history
            )
            if old_b is not None:
                padded_b[:, 2 - history : 2, 1:-1, 1:-1] = old_b
                old_frames = max(kept - t, 0)
                if old_frames:
                    new_b[:, :old_frames] = old_b[:, -old_frames:]
            outputs.append(padded_b[:, 2:])
            old_a, old_b = new_a, new_b
        return torch.cat(outputs, 1), old_a, old_b

    for whole, parts in zip(run([clip]), run(clip.split(split, 1)), strict=True):
        assert torch.equal(whole, parts)
        assert not whole.isnan().any()
