# SPDX-License-Identifier: Apache-2.0
"""S10: activations of more than 2^31 elements are right everywhere."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import CausalConv3dWithCache, Conv3dRaw, ops, pack_conv3d_weight
from cudnn_blocks.reference.conv3d import conv3d_rmsnorm_silu_pad
from tests.helpers.conv3d_gpu import CUDA, ENGINES
from tests.helpers.conv3d_problem import ATOL, RTOL
from tests.helpers.tensors import assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # gigabytes, and a compile
BF16, C = torch.bfloat16, 160
T, H, W = 20, 1026, 738


def big(*shape):
    """Small integers, different from voxel to voxel."""
    return torch.empty(shape, dtype=BF16, device=CUDA).random_(0, 7)


def identity():
    weight = torch.zeros(C, C, 3, 3, 3, dtype=BF16, device=CUDA)
    weight[range(C), range(C), 1, 1, 1] = 1
    return pack_conv3d_weight(weight)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_centre_tap_identity_copies_every_voxel(engine):
    x = big(1, T, H, W, C)
    output = torch.full((1, T - 2, H - 2, W - 2, C), torch.nan, dtype=BF16, device=CUDA)
    assert output.numel() > 2**31
    plan = Conv3dRaw(x, identity(), output, engines={"conv3d": engine})
    plan.compile()
    plan.execute(x, identity(), output)
    at = torch.tensor([0, output.numel() // 2, 2**31 - 1, 2**31, output.numel() - 1], device=CUDA)
    n, t, h, w, c = torch.unravel_index(at, output.shape)
    assert torch.equal(output[n, t, h, w, c], x[n, t + 1, h + 1, w + 1, c])
    for frame in range(T - 2):
        assert torch.equal(output[:, frame], x[:, frame + 1, 1:-1, 1:-1]), f"frame {frame}"


def test_the_fused_pad_beyond_2_to_the_31():
    """The last frames against the reference on them alone; borders all over."""
    x = big(1, T, H, W, C)
    weight, bias = identity(), torch.ones(C, dtype=BF16, device=CUDA)
    results = ops.conv3d_rmsnorm_silu_pad(x, weight, bias, bias)
    padded, cache = results["padded_output"], results["cache_output"]
    assert padded.numel() > 2**31
    tail = x[:, -4:, -40:, -40:].contiguous()
    small = torch.empty(1, 4, 40, 40, C, dtype=BF16, device=CUDA)
    kept = torch.empty(1, 2, 38, 38, C, dtype=BF16, device=CUDA)
    conv3d_rmsnorm_silu_pad(tail, weight, bias, bias, small, kept)
    got = padded[:, -2:, -39:-1, -39:-1]
    torch.testing.assert_close(got, small[:, 2:, 1:-1, 1:-1], atol=ATOL, rtol=RTOL)
    torch.testing.assert_close(cache[:, :, -38:, -38:], kept, atol=ATOL, rtol=RTOL)
    assert not padded[:, :2].any()
    for edge in (0, -1):
        assert not padded[:, :, edge].any()
        assert not padded[:, :, :, edge].any()


def test_the_norm_alone_beyond_2_to_the_31():
    x = big(1, T, H, W, C)
    gamma = torch.ones(C, dtype=BF16, device=CUDA)
    results = ops.rmsnorm_silu_pad(x, gamma, save_input=True)
    assert_same_bits(results["residual_output"][:, -1], x[:, -1], "residual_output")
    padded = results["padded_output"]
    alone = ops.rmsnorm_silu_pad(x[:, -2:].contiguous(), gamma)
    assert_same_bits(padded[:, -2:], alone["padded_output"][:, -2:], "the last frames")
    assert_same_bits(results["cache_output"], alone["cache_output"], "cache")
    assert not padded[:, :2].any()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_causal_convolution_beyond_2_to_the_31(engine):
    chunk = big(1, 12, T, H - 2, W - 2)
    weight = torch.randint(-2, 3, (C, 448), device=CUDA).to(BF16)
    weight.view(C, 28, 16)[:, :, 12:] = 0
    weight[:, 432:] = 0

    def run(x, previous):
        n, _, t, h, w = x.shape
        history = 0 if previous is None else previous.shape[1]
        cache = torch.empty(n, min(2, t + history), h, w, 12, dtype=BF16, device=CUDA)
        output = torch.empty(n, t, h, w, C, dtype=BF16, device=CUDA)
        plan = CausalConv3dWithCache(
            x, weight, None, cache, output, previous, engines={"causal_conv3d": engine}
        )
        plan.compile()
        workspace = torch.empty(plan.get_workspace_size(), dtype=torch.uint8, device=CUDA)
        plan.execute(x, weight, None, cache, output, previous, workspace=workspace)
        return output, cache

    whole, _ = run(chunk, None)
    assert whole.numel() > 2**31
    _, history = run(chunk[:, :, T - 4 : T - 2], None)
    last, _ = run(chunk[:, :, T - 2 :], history)
    assert_same_bits(whole[:, -2:], last, "the last frames")
    first, _ = run(chunk[:, :, :2], None)
    assert_same_bits(whole[:, :2], first, "the first frames")
