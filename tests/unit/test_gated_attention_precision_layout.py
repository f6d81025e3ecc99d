# SPDX-License-Identifier: Apache-2.0
"""Layout contract of the precision modes: stages, regions, and that earlier modes stay put."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import Fp4Format, GatedAttentionGeometry
from cudnn_blocks.blocks.gated_attention_modes import MODES, Precision, mode_of
from cudnn_blocks.blocks.gated_attention_regions import Regions
from cudnn_blocks.quant_spec import BlockFormat
from cudnn_blocks.workspace import WorkspaceLayout

SMALL = GatedAttentionGeometry(d_model=512, h_q=8, h_kv=2, d_head=256, rope_dim=64)
LARGE = GatedAttentionGeometry(d_model=4096, h_q=32, h_kv=2, d_head=256, rope_dim=64)
FP8, MX, MX_FP4_O = Precision.FP8, Precision.MX, Precision.MX_FP4_O
NVFP4, MXFP4 = Fp4Format.NVFP4.value, Fp4Format.MXFP4.value

OFFSETS = {
    (FP8, False, None): (
        {
            "proj": 0,
            "q8": 20480000,
            "k8": 24576000,
            "v8": 25600000,
            "o": 26624000,
            "o8": 34816000,
        },
        38912000,
    ),
    (FP8, True, None): (
        {"q8": 0, "k8": 4096000, "v8": 5120000, "gate16": 6144000, "o8": 14336000},
        18432000,
    ),
    (MX, False, None): (
        {
            "proj": 0,
            "q8": 20480000,
            "k8": 24576000,
            "v8": 25600000,
            "o": 26624000,
            "o8": 34816000,
            "sf_q": 38912000,
            "sf_k": 39043072,
            "sf_v": 39075840,
        },
        39108608,
    ),
    (MX, True, None): (
        {
            "q8": 0,
            "k8": 4096000,
            "v8": 5120000,
            "gate16": 6144000,
            "o8": 14336000,
            "sf_q": 18432000,
            "sf_k": 18563072,
            "sf_v": 18595840,
        },
        18628608,
    ),
    (MX_FP4_O, False, NVFP4): (
        {
            "proj": 0,
            "q8": 20480000,
            "k8": 24576000,
            "v8": 25600000,
            "o": 26624000,
            "sf_q": 34816000,
            "sf_k": 34947072,
            "sf_v": 34979840,
            "o4": 35012608,
            "sf_o": 37060608,
        },
        37322752,
    ),
    (MX_FP4_O, True, MXFP4): (
        {
            "q8": 0,
            "k8": 4096000,
            "v8": 5120000,
            "gate16": 6144000,
            "o": 14336000,
            "sf_q": 22528000,
            "sf_k": 22659072,
            "sf_v": 22691840,
            "o4": 22724608,
            "sf_o": 24772608,
        },
        24903680,
    ),
}
"""At B = 2 and S = 1000 of the small geometry; no change may move one."""
LARGE_TOTALS = {
    (FP8, False): 281018368,
    (FP8, True): 138412032,
    (MX, False): 282198016,
    (MX, True): 139591680,
}
STAGES = {
    (FP8, False): "qkv_gate_proj qk_norm_rope quantize_q quantize_kv sdpa sigmoid_gate quantize_o "
    "out_proj",
    (FP8, True): "qkv_gate_proj_norm_rope sdpa out_proj",
    (MX, False): "qkv_gate_proj qk_norm_rope quantize_mxfp8_q quantize_mxfp8_k quantize_mxfp8_v "
    "sdpa sigmoid_gate quantize_o out_proj",
    (MX, True): "qkv_gate_proj_norm_rope sdpa out_proj",
    (MX_FP4_O, False): "qkv_gate_proj qk_norm_rope quantize_mxfp8_q quantize_mxfp8_k "
    "quantize_mxfp8_v sdpa sigmoid_gate quantize_fp4_o out_proj",
    (MX_FP4_O, True): "qkv_gate_proj_norm_rope sdpa quantize_fp4_o out_proj",
}


def layout_of(
    geometry: GatedAttentionGeometry,
    precision: Precision,
    fused: bool,
    o_format: BlockFormat | None,
    batch: int,
    tokens: int,
) -> WorkspaceLayout:
    mode = mode_of(precision, fuse_norm_rope=fused, fuse_gate=fused)
    layout = WorkspaceLayout()
    Regions(geometry, torch.bfloat16, mode, o_format).book(layout, batch, tokens)
    return layout


@pytest.mark.parametrize("key", OFFSETS, ids=str)
def test_offsets_are_frozen(key):
    offsets, size_bytes = OFFSETS[key]
    layout = layout_of(SMALL, *key, 2, 1000)
    assert {region.name: region.offset_bytes for region in layout.regions} == offsets
    assert layout.size_bytes == size_bytes


@pytest.mark.parametrize("key", LARGE_TOTALS, ids=str)
def test_totals_of_the_large_geometry(key):
    assert layout_of(LARGE, *key, None, 1, 4096).size_bytes == LARGE_TOTALS[key]


@pytest.mark.parametrize("key", STAGES, ids=str)
def test_stages_in_launch_order(key):
    precision, fused = key
    mode = mode_of(precision, fuse_norm_rope=fused, fuse_gate=fused)
    assert " ".join(mode.slots) == STAGES[key]


def test_the_modes_are_all_there_are():
    stated = {(precision, fused, fused) for precision, fused in STAGES}
    knobs = ((False, False), (True, False), (False, True), (True, True))
    assert set(MODES) == stated | {(Precision.ACTIVATION, *both) for both in knobs}


@pytest.mark.parametrize("key", OFFSETS, ids=str)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (3, 7), (2, 129), (0, 7), (2, 0)])
def test_regions_hold_what_their_views_reach(key, batch, tokens):
    precision, fused, o_format = key
    mode = mode_of(precision, fuse_norm_rope=fused, fuse_gate=fused)
    regions = Regions(SMALL, torch.bfloat16, mode, o_format)
    layout = layout_of(SMALL, *key, batch, tokens)
    workspace = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    views = regions.views(layout, workspace, batch, tokens)
    for names in mode.takes.values():
        given = {name for name in names if name is not None} & set(views)
        assert all(views[name].untyped_storage().data_ptr() for name in given if batch * tokens)
    for region in layout.regions:
        view = views[region.name]
        assert view.numel() * view.element_size() == region.size_bytes


def test_every_name_that_a_stage_takes_is_an_operand_or_a_view():
    operands = {"h", "w_qkvg", "w_q_norm", "w_k_norm", "cos", "sin", "w_o", "out", "lse"}
    operands |= {"seq_lens", "h_sf", "w_qkvg_sf", "w_o_sf", "engine_scratch"}
    for (precision, *_), mode in MODES.items():
        o_format = NVFP4 if precision is MX_FP4_O else None
        regions = Regions(SMALL, torch.bfloat16, mode, o_format)
        layout = WorkspaceLayout()
        regions.book(layout, 1, 1)
        workspace = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        known = operands | set(regions.views(layout, workspace, 1, 1))
        taken = {name for names in mode.takes.values() for name in names if name is not None}
        assert taken <= known, precision
        assert set(mode.regions) - {"proj"} <= taken | {"proj"}, f"{precision}: a region is unused"
