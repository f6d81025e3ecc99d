# SPDX-License-Identifier: Apache-2.0
"""The VAE of diffusers on a GPU, at the widths of WAN 2.2: accelerated against eager and FP32."""

from __future__ import annotations

import copy

import pytest
import torch

from cudnn_blocks.integrations.diffusers import (
    accelerate_vae_decoder,
    accelerate_vae_encoder,
    random_model,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),  # some sixty kernels are compiled
]
HEIGHT, WIDTH = 64, 96
NO_WORSE = 1.5
"""Our RMS distance to the FP32 model over the eager BF16 model's."""


@pytest.fixture(scope="module", autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def models():
    """Eager, FP32 and accelerated, with the same weights; kernels compiled."""
    eager = random_model("cuda")
    exact, ours = copy.deepcopy(eager).float(), copy.deepcopy(eager)
    for accelerate in (accelerate_vae_encoder, accelerate_vae_decoder):
        accelerate(ours).warm(HEIGHT, WIDTH)
    return eager, exact, ours


def clip(batch, frames):
    generator = torch.Generator("cuda").manual_seed(frames)
    shape = (batch, 3, frames, HEIGHT, WIDTH)
    return (torch.rand(shape, device="cuda", generator=generator) * 2 - 1).bfloat16()


def latents(frames):
    generator = torch.Generator("cuda").manual_seed(frames)
    shape = (1, 48, frames, HEIGHT // 16, WIDTH // 16)
    return torch.randn(shape, device="cuda", generator=generator).bfloat16()


def encode(vae, x):
    return vae.encode(x).latent_dist.parameters


def decode(vae, z):
    return vae.decode(z).sample


def check(models, run, x):
    eager, exact, ours = models
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        wanted = run(exact, x.float())
    got, reference = run(ours, x), run(eager, x)
    assert got.shape == reference.shape
    error, eager_error = ((one - wanted).square().mean().sqrt() for one in (got, reference))
    assert error <= NO_WORSE * eager_error
    return got


@pytest.mark.parametrize(("batch", "frames"), [(1, 1), (1, 5), (1, 17), (1, 33), (4, 5)])
def test_encodes_as_well_as_the_eager_model(models, batch, frames):
    got = check(models, encode, clip(batch, frames))
    if frames == 17:  # two clips in a row
        assert torch.equal(encode(models[2], clip(batch, frames)), got)


@pytest.mark.parametrize("frames", [1, 3])
def test_decodes_as_well_as_the_eager_model(models, frames):
    check(models, decode, latents(frames))


def test_a_warm_encode_never_waits_for_the_gpu(models):
    x = clip(1, 17)
    expected = encode(models[2], x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = encode(models[2], x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, expected)


def test_an_encode_can_be_captured(models):
    x = clip(1, 5)
    expected = encode(models[2], x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = encode(models[2], x)
    for _ in range(2):
        got.zero_()
        graph.replay()
        assert torch.equal(got, expected)


@pytest.mark.parametrize("frames", [1, 17])
def test_an_encode_needs_no_more_memory_than_the_eager_one(models, frames):
    eager, _, ours = models
    peaks = []
    for vae in (eager, ours):
        x = clip(1, frames)
        encode(vae, x)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        encode(vae, x)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= peaks[0]
