# SPDX-License-Identifier: Apache-2.0
"""transformers' Qwen3-Next attention on the block, in the published sizes."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.gated_attention_block.sampled import near
from benchmarks.qwen3_next_attention.bench import LIMIT
from benchmarks.qwen3_next_attention.problem import LayerProblem
from cudnn_blocks.integrations.transformers import accelerate_gated_attention
from tests.helpers.tensors import assert_same_bits

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def accelerated(tokens):
    """Inputs with an accelerated copy of their layer, and its handle."""
    problem = LayerProblem(tokens)
    buffers = problem.make_set("cuda")
    layer = copy.deepcopy(buffers["layer"])
    return problem, buffers, layer, accelerate_gated_attention(layer)


@pytest.mark.parametrize("tokens", [1, 130, 2048])
def test_a_layer_is_right(tokens):
    problem, buffers, layer, acceleration = accelerated(tokens)
    out, _ = layer(buffers["h"], buffers["tables"], None)
    assert near(out, problem.expected(buffers), LIMIT) is None
    assert acceleration.stats().accelerated == 1
    assert acceleration.stats().original == {}


def test_both_fusions_run_on_the_engine_of_this_gpu():
    *_, acceleration = accelerated(1)
    (row,) = acceleration.explain().rows
    assert row.runs == "GatedAttentionBlockFwd(fuse_norm_rope, fuse_gate)"
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert row.engine == ("hopper" if is_hopper else "portable")


def test_one_table_serves_a_batch():
    problem, buffers, layer, acceleration = accelerated(70)
    h = torch.randn(3, 70, problem.geometry.d_model, device="cuda").bfloat16()
    out, _ = layer(h, buffers["tables"], None)
    expected, _ = buffers["layer"](h, buffers["tables"], None)
    assert near(out, expected, 2 * LIMIT) is None
    assert acceleration.stats().accelerated == 1


def test_a_graph_replays():
    _, buffers, layer, _ = accelerated(256)
    expected, _ = layer(buffers["h"], buffers["tables"], None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = layer(buffers["h"], buffers["tables"], None)
    out.zero_()
    graph.replay()
    assert_same_bits(out, expected, "out")


def test_moved_weights_are_repacked():
    _, buffers, layer, acceleration = accelerated(64)
    before, _ = layer(buffers["h"], buffers["tables"], None)
    layer.to("cpu").to("cuda")
    after, _ = layer(buffers["h"], buffers["tables"], None)
    assert_same_bits(after, before, "out")
    assert acceleration.stats().original == {}
