# SPDX-License-Identifier: Apache-2.0
"""The bits of a frame depend on neither the chunk that it comes in nor the tile that is chosen."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import ops, pack_causal_conv3d_weight, pack_conv3d_weight
from cudnn_blocks.stages.kernel_cache import KERNELS
from tests.helpers.conv3d_forms import BIAS_PAD, CAUSAL, NORM, NORM_PAD, RAW
from tests.helpers.conv3d_gpu import (
    CUDA,
    ENGINES,
    LARGE,
    SMALL,
    TALL,
    compiled_plan,
    frames_of,
)
from tests.helpers.conv3d_problem import assert_exact, make_problem
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # a convolution compiles for many seconds
BF16 = torch.bfloat16


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("kind", "channels", "residual"),
    [
        (RAW, (160, 160), "none"),
        (RAW, (320, 640), "none"),
        (NORM, (160, 160), "add_biased"),
        (NORM, (160, 320), "none"),
        (BIAS_PAD, (160, 160), "add"),
    ],
)
def test_every_tile_and_every_chunk_gives_the_same_bits(engine, kind, channels, residual):
    problem = make_problem(kind, (2, 4, 33, 33), channels, device=CUDA, residual=residual)
    whole = None
    for tile_sites in (SMALL, TALL, LARGE):
        plan = compiled_plan(kind, engine, channels, tile_sites, residual=residual)
        ours = problem.clone()
        ours.execute(plan)
        whole = whole or ours.written
        assert_exact(ours.written, whole, plan.describe())
        for first, count in ((0, 1), (1, 2), (3, 1)):
            part = frames_of(problem, first, count)
            part.execute(plan)
            expected = {n: t[:, first : first + count] for n, t in whole.items()}
            assert_exact(part.written, expected, f"frames {first} to {first + count}")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("history_frames", range(3))
def test_every_tile_of_the_causal_convolution_gives_the_same_bits(engine, history_frames):
    problem = make_problem(CAUSAL, (2, 4, 33, 33), device=CUDA, history_frames=history_frames)
    whole = None
    for tile_sites in (SMALL, TALL, LARGE, (2, 8, 33, 2000), (2, 8, 2000, 33)):
        plan = compiled_plan(CAUSAL, engine, tile_sites=tile_sites, history_frames=history_frames)
        ours = problem.clone()
        ours.execute(plan)
        whole = whole or ours.written
        assert_exact(ours.written, whole, plan.describe())


def normal(*shape, scale=1.0):
    return (torch.randn(shape, device=CUDA) * scale).to(BF16)


def encode(chunks, weights, bias, gamma):
    """Causal layer, norm-pad, fused block with a residual, hinted first chunk; fresh histories."""
    outputs, histories = [], [None, None, None]
    for chunk in chunks:
        frames, count = chunk.shape[2], 0 if histories[0] is None else histories[0].shape[1]
        raw = ops.causal_conv3d_with_cache(chunk, weights[0], histories[0])
        mid = ops.rmsnorm_silu_pad(raw["output"], gamma, bias, previous=histories[1])
        fused = ops.conv3d_rmsnorm_silu_pad(
            mid["padded_output"],
            weights[1],
            bias,
            gamma,
            count,
            residual=raw["output"],
            zero_leading_frames=2 - count,
        )
        padded, cache = fused["padded_output"], fused["cache_output"]
        if count:
            old = histories[2]
            padded[:, 2 - count : 2, 1:-1, 1:-1] = old
            carried = max(cache.shape[1] - frames, 0)
            if carried:
                cache[:, :carried] = old[:, -carried:]
        histories = [raw["cache_output"], mid["cache_output"], cache]
        outputs.append(ops.conv3d_raw(padded, weights[1], zero_leading_frames=2 - count))
    return torch.cat(outputs, 1), histories


@pytest.mark.parametrize("size", [(17, 33), (90, 158)])
def test_an_encoder_streams_like_the_whole_clip(size):
    """S11 on the default engines, where other lengths choose other tiles."""
    clip = normal(1, 12, 9, *size)
    weights = (
        pack_causal_conv3d_weight(normal(160, 12, 3, 3, 3, scale=1 / 18)),
        pack_conv3d_weight(normal(160, 160, 3, 3, 3, scale=1 / 66)),
    )
    bias, gamma = normal(160), normal(160)
    whole, ends = encode([clip], weights, bias, gamma)
    assert not whole.isnan().any()
    for split in ([1, 4, 4], [1] * 9, [2, 3, 4], [4, 4, 1]):
        parts, part_ends = encode(clip.split(split, 2), weights, bias, gamma)
        assert_same_bits(parts, whole, f"{split}")
        for a, b in zip(part_ends, ends, strict=True):
            assert_same_bits(a, b, f"history of {split}")


def test_a_new_resolution_compiles_nothing_unless_the_tile_changes():
    def call(kind, sites, **options):
        make_problem(kind, sites, (24, 40), device=CUDA, **options).call()

    seen = set()
    for kind in (RAW, NORM_PAD):
        for sites in ((1, 1, 8, 32), (1, 2, 9, 31), (2, 1, 7, 30), (1, 3, 8, 33), (3, 1, 5, 29)):
            problem = make_problem(kind, sites, (24, 40), device=CUDA)
            plan = problem.plan()
            plan.check_support()
            config = plan._stages[0]._choose_kernel().config
            before = KERNELS.stats().compiled
            call(kind, sites)
            assert KERNELS.stats().compiled - before <= (config not in seen), f"{kind} {sites}"
            seen.add(config)
    before = KERNELS.stats().compiled
    for frames in (1, 2, 3):
        make_problem("norm_only", (1, frames, 4, 5), (24, 40), device=CUDA).call()
    assert KERNELS.stats().compiled - before <= 1
