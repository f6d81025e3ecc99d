# SPDX-License-Identifier: Apache-2.0
"""The layout contract of the block: regions, stages, and where every argument stands."""

from __future__ import annotations

import inspect

import pytest
import torch

from cudnn_blocks import GatedAttentionBlockFwd, GatedAttentionGeometry, TensorSpec, ops
from cudnn_blocks.target import TARGET_NAMES
from tests.helpers.gated_attention_problem import KNOBS, SMALL, make_problem

TEST_GEOMETRY = GatedAttentionGeometry(d_model=512, h_q=8, h_kv=2, d_head=256, rope_dim=64)
LARGE_GEOMETRY = GatedAttentionGeometry(d_model=4096, h_q=32, h_kv=2, d_head=256, rope_dim=64)
QWEN3_NEXT = GatedAttentionGeometry(d_model=2048, h_q=16, h_kv=2, d_head=256, rope_dim=64)
SNAPSHOT = (
    (TEST_GEOMETRY, 2, 1000, {"proj": (0, 20480000), "o": (20480000, 8192000)}, 28672000),
    (LARGE_GEOMETRY, 1, 4096, {"proj": (0, 142606336), "o": (142606336, 67108864)}, 209715200),
    (QWEN3_NEXT, 1, 8192, {"proj": (0, 150994944), "o": (150994944, 67108864)}, 218103808),
    (SMALL, 1, 1, {"proj": (0, 1536), "o": (1536, 512)}, 2048),
    (SMALL, 3, 7, {"proj": (0, 32256), "o": (32256, 10752)}, 43008),
    (SMALL, 0, 7, {"proj": (0, 0), "o": (0, 0)}, 0),
)
"""Offset and size in bytes of every region; no change may move one."""


def meta_plan(geometry, batch, tokens, dtype=torch.bfloat16, target="cpu", **knobs):
    def spec(*shape):
        return TensorSpec.contiguous(shape, dtype)

    hidden, norm = spec(batch, tokens, geometry.d_model), spec(geometry.d_head)
    table = spec(batch, tokens, geometry.rope_dim)
    return GatedAttentionBlockFwd(
        hidden,
        spec(geometry.n_qkvg, geometry.d_model),
        norm,
        norm,
        table,
        table,
        spec(geometry.d_model, geometry.attn_width),
        hidden,
        geometry,
        target=target,
        **knobs,
    )


@pytest.mark.parametrize(("geometry", "batch", "tokens", "regions", "size_bytes"), SNAPSHOT)
@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_regions_are_frozen(geometry, batch, tokens, regions, size_bytes, knobs):
    for dtype in (torch.bfloat16, torch.float16):
        for extra in ({}, {"return_lse": True, "seq_lens_present": True}):
            plan = meta_plan(geometry, batch, tokens, dtype, **knobs, **extra)
            assert plan.get_workspace_size() == size_bytes
            found = {r.name: (r.offset_bytes, r.size_bytes) for r in plan.workspace_layout.regions}
            assert found == regions


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_our_kernels_need_no_more_than_the_named_regions(knobs):
    """On every target the size is the reference's: no engine of our own needs scratch."""
    for target in TARGET_NAMES:
        plan = meta_plan(TEST_GEOMETRY, 2, 1000, target=target, **knobs)
        assert plan.get_workspace_size() == 28672000


def test_regions_are_aligned_and_apart():
    for tokens in (1, 3, 129):
        layout = make_problem(SMALL, 3, tokens).plan().workspace_layout
        end = 0
        for region in layout.regions:
            assert region.offset_bytes % 256 == 0
            assert region.offset_bytes >= end
            end = region.offset_bytes + region.size_bytes
        assert layout.size_bytes >= end
        assert layout.size_bytes % 256 == 0


@pytest.mark.parametrize(
    ("knobs", "stages"),
    [
        ({}, ["qkv_gate_proj", "qk_norm_rope", "sdpa", "sigmoid_gate", "out_proj"]),
        (
            {"fuse_norm_rope": True},
            ["qkv_gate_proj_norm_rope", "sdpa", "sigmoid_gate", "out_proj"],
        ),
        ({"fuse_gate": True}, ["qkv_gate_proj", "qk_norm_rope", "sdpa", "out_proj"]),
        (
            {"fuse_norm_rope": True, "fuse_gate": True},
            ["qkv_gate_proj_norm_rope", "sdpa", "out_proj"],
        ),
    ],
    ids=str,
)
def test_stages_of_each_knob(knobs, stages):
    plan = make_problem(SMALL, 1, 4).plan(**knobs)
    assert [stage.stage for stage in plan.probe().stages] == stages
    described = plan.describe()
    for stage in stages:
        assert f"  {stage}: reference" in described
    assert "proj" in described


def test_constructor_arguments_stand_where_they_stood():
    parameters = list(inspect.signature(GatedAttentionBlockFwd).parameters.values())
    assert [p.name for p in parameters] == [
        "sample_h",
        "sample_w_qkvg",
        "sample_w_q_norm",
        "sample_w_k_norm",
        "sample_cos",
        "sample_sin",
        "sample_w_o",
        "sample_out",
        "geometry",
        "return_lse",
        "save_for_backward",
        "seq_lens_present",
        "inplace_qkv",
        "fuse_norm_rope",
        "fuse_gate",
        "quant",
        "sample_h_sf",
        "sample_w_qkvg_sf",
        "sample_w_o_sf",
        "engines",
        "target",
    ]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[:9])
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[9:])
    defaults = {p.name: p.default for p in parameters[9:]}
    assert {name for name, value in defaults.items() if value is None} == {
        "inplace_qkv",
        "quant",
        "sample_h_sf",
        "sample_w_qkvg_sf",
        "sample_w_o_sf",
        "engines",
        "target",
    }
    assert not any(defaults.values())


def test_execute_arguments_stand_where_they_stood():
    parameters = list(inspect.signature(GatedAttentionBlockFwd.execute).parameters.values())[1:]
    assert [p.name for p in parameters] == [
        "h",
        "w_qkvg",
        "w_q_norm",
        "w_k_norm",
        "cos",
        "sin",
        "w_o",
        "out",
        "workspace",
        "seq_lens",
        "lse",
        "saved",
        "current_stream",
        "h_sf",
        "w_qkvg_sf",
        "w_o_sf",
    ]
    assert all(p.default is p.empty for p in parameters[:9])
    assert all(p.default is None for p in parameters[9:])


def test_functional_arguments_stand_where_they_stood():
    parameters = inspect.signature(ops.gated_attention).parameters
    assert list(parameters) == [
        "h",
        "w_qkvg",
        "w_q_norm",
        "w_k_norm",
        "cos",
        "sin",
        "w_o",
        "geometry",
        "seq_lens",
        "return_lse",
        "fuse_norm_rope",
        "fuse_gate",
        "current_stream",
        "quant",
        "h_sf",
        "w_qkvg_sf",
        "w_o_sf",
    ]


def test_a_plan_is_built_and_sized_without_a_tensor_in_memory():
    for target in TARGET_NAMES:
        report = GatedAttentionBlockFwd.probe(
            *(meta_plan(QWEN3_NEXT, 1, 8192)._specs.values()), QWEN3_NEXT, target=target
        )
        assert report.served, report.decline
        assert report.workspace_bytes == 218103808
        assert {stage.engine for stage in report.stages} <= {"reference", "portable", "hopper"}
