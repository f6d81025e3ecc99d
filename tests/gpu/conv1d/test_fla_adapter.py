# SPDX-License-Identifier: Apache-2.0
"""The adapter on FLA's own ShortConvolution, beside FLA's own kernels."""

from __future__ import annotations

import copy

import pytest
import torch

from cudnn_blocks.integrations.flash_linear_attention import accelerate_short_convolutions
from tests.gpu.conv1d.test_conv1d_peers import assert_close, peer
from tests.helpers.tensors import assert_same_bits

pytestmark = pytest.mark.gpu
STEPS = 4


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def pair(rows, channels, **changes):
    """FLA's module, an accelerated copy, its handle, and a cache."""
    kind = peer("fla.modules.causal_conv1d").ShortConvolution
    with torch.device("cuda"):
        theirs = kind(channels, 4, dtype=torch.bfloat16, **changes).eval()
        cache = torch.randn(rows, channels, 4).bfloat16()
    ours = copy.deepcopy(theirs)
    return theirs, ours, accelerate_short_convolutions(ours), cache


def token(rows, channels):
    return torch.randn(rows, 1, channels, device="cuda").bfloat16()


@pytest.mark.parametrize("changes", [{}, {"bias": True}, {"activation": None}], ids=str)
@pytest.mark.parametrize(("rows", "channels"), [(1, 2048), (3, 520), (128, 8192)])
def test_steps_are_flas_own(rows, channels, changes):
    theirs, ours, acceleration, cache = pair(rows, channels, **changes)
    their_cache = cache.clone()
    for _ in range(STEPS):
        x = token(rows, channels)
        y, state = ours(x, cache=cache, output_final_state=True)
        expected, _ = theirs(x, cache=their_cache, output_final_state=True)
        assert state is cache
        assert_close(y, expected, "y")
        assert_same_bits(cache, their_cache, "cache")
    assert acceleration.stats().accelerated == STEPS
    assert acceleration.stats().original == {}
    assert acceleration.explain().rows[0].engine == "portable"


def test_packed_sequences_and_the_calls_that_stay_with_fla():
    theirs, ours, acceleration, cache = pair(5, 2048)
    bounds = torch.arange(6, device="cuda")
    calls = [
        (token(5, 2048).transpose(0, 1), {"cache": cache, "cu_seqlens": bounds}),
        (token(5, 2048), {"cache": cache, "residual": token(5, 2048)}),
        (token(5, 2048), {"cache": None}),
    ]
    for x, arguments in calls:
        both = [{k: v if v is None else v.clone() for k, v in arguments.items()} for _ in "ab"]
        y, _ = ours(x, output_final_state=True, **both[0])
        expected, _ = theirs(x, output_final_state=True, **both[1])
        assert_close(y, expected, "y")
        if arguments["cache"] is not None:
            assert_same_bits(both[0]["cache"], both[1]["cache"], "cache")
    assert acceleration.stats().accelerated == 1
    assert sum(acceleration.stats().original.values()) == 2


def test_a_graph_of_steps_replays():
    _, ours, acceleration, cache = pair(8, 2048)
    x, start = token(8, 2048), cache.clone()
    expected = [ours(x, cache=cache)[0].clone() for _ in range(2)]
    moved = cache.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [ours(x, cache=cache)[0] for _ in range(2)]
    for _ in range(2):
        cache.copy_(start)
        graph.replay()
        for y, wanted in zip(captured, expected, strict=True):
            assert_same_bits(y, wanted, "y")
        assert_same_bits(cache, moved, "cache")
    assert acceleration.stats().original == {}
