# SPDX-License-Identifier: Apache-2.0
"""The upstream names: each is an object of this package and takes upstream's arguments in order.

The argument orders below are those of nvidia-cudnn-frontend 1.32.0, written out.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect

import pytest
import torch

import cudnn_blocks
from cudnn_blocks import geometry, ops, quant_spec
from cudnn_blocks.integrations import upstream_names

CONV_NORM = "input packed_weight bias gamma"
RESIDUAL = "residual residual_bias"
BLOCK = "h w_qkvg w_q_norm w_k_norm cos sin w_o"

FUNCTIONS = {
    "causal_conv1d_update": (ops.causal_conv1d_update, "x conv_state weight bias activation"),
    "conv3d_raw_wrapper_sm100": (ops.conv3d_raw, "input packed_weight current_stream"),
    "causal_conv3d_with_cache_wrapper_sm100": (
        ops.causal_conv3d_with_cache,
        "input packed_weight previous current_stream",
    ),
    "conv3d_rmsnorm_silu_wrapper_sm100": (
        ops.conv3d_rmsnorm_silu,
        f"{CONV_NORM} {RESIDUAL} current_stream",
    ),
    "conv3d_rmsnorm_silu_pad_wrapper_sm100": (
        ops.conv3d_rmsnorm_silu_pad,
        f"{CONV_NORM} history_frames {RESIDUAL} current_stream",
    ),
    "conv3d_bias_residual_pad_wrapper_sm100": (
        ops.conv3d_bias_residual_pad,
        f"input packed_weight bias {RESIDUAL} current_stream",
    ),
    "rmsnorm_silu_pad_wrapper_sm100": (
        ops.rmsnorm_silu_pad,
        f"input gamma input_bias previous {RESIDUAL} current_stream",
    ),
    "pack_conv3d_weight_sm100": (cudnn_blocks.pack_conv3d_weight, "weight"),
    "pack_causal_conv3d_weight_sm100": (cudnn_blocks.pack_causal_conv3d_weight, "weight"),
    "build_fused_qkvg_weight": (cudnn_blocks.build_fused_qkvg_weight, "w_q_gate w_k w_v geometry"),
    "gated_attention_block_forward": (ops.gated_attention, f"{BLOCK} geometry"),
}
"""Name to what it is and upstream's positional arguments."""

KEYWORDS = {
    "causal_conv1d_update": {"cache_seqlens", "conv_state_indices"},
    "rmsnorm_silu_pad_wrapper_sm100": {"save_input"},
    "build_fused_qkvg_weight": {"q_gate_layout"},
    "gated_attention_block_forward": {"seq_lens", "return_lse", "current_stream"},
}
"""Upstream's keyword-only arguments that are served."""

CONV_WRITTEN = f"{CONV_NORM} output {RESIDUAL} residual_output"
PAD_WRITTEN = f"{CONV_NORM} padded_output cache_output"
CLASSES = {
    "Conv3dRawSm100": (ops.Conv3dRaw, "input packed_weight output", None),
    "CausalConv3dWithCacheSm100": (
        ops.CausalConv3dWithCache,
        "input packed_weight padded_input cache_output output previous",
        None,
    ),
    "Conv3dRmsNormSiluSm100": (ops.Conv3dRmsNormSilu, CONV_WRITTEN, None),
    "Conv3dRmsNormSiluPadSm100": (
        ops.Conv3dRmsNormSiluPad,
        f"{PAD_WRITTEN} history_frames {RESIDUAL} residual_output",
        f"{PAD_WRITTEN} {RESIDUAL} residual_output",
    ),
    "Conv3dBiasResidualPadSm100": (
        ops.Conv3dBiasResidualPad,
        "input packed_weight bias residual padded_output residual_bias",
        None,
    ),
    "RmsNormSiluPadSm100": (
        ops.RmsNormSiluPad,
        f"input gamma padded_output cache_output input_bias previous {RESIDUAL} residual_output",
        None,
    ),
    "GatedAttentionBlockFwd": (
        cudnn_blocks.GatedAttentionBlockFwd,
        f"{BLOCK} out geometry",
        f"{BLOCK} out workspace seq_lens lse saved current_stream h_sf w_qkvg_sf w_o_sf",
    ),
}
"""Name to the class, its samples and, where they are not the same with a stream, its operands."""

BLOCK_KNOBS = (
    "return_lse save_for_backward seq_lens_present inplace_qkv fuse_norm_rope fuse_gate quant "
    "sample_h_sf sample_w_qkvg_sf sample_w_o_sf"
)
FIELDS = {
    "GatedAttentionBlockGeometry": (
        geometry.GatedAttentionGeometry,
        "d_model h_q h_kv d_head rope_dim qk_norm_eps attn_scale is_causal causal_bottom_right "
        "window_left window_right qk_norm",
    ),
    "QuantSpec": (
        quant_spec.QuantSpec,
        "descale_h descale_w_qkvg descale_w_o scale_q scale_k scale_v scale_o dtype",
    ),
    "MxQuantSpec": (
        quant_spec.MxQuantSpec,
        "descale_w_o scale_o dtype block_size w_qkvg_dtype o_fp4",
    ),
}
OTHERS = {"Fp4Format", "ProjBlock", "QKVG_TILE_ALIGN", "ops", "qkvg_from_hf"}


def positional(function) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.kind in kinds and one.name != "self"]


def test_every_name_is_pinned():
    assert set(upstream_names.__all__) == {*FUNCTIONS, *CLASSES, *FIELDS, *OTHERS}
    assert upstream_names.__all__ == sorted(
        upstream_names.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_upstreams_arguments_in_order(name):
    own, arguments = FUNCTIONS[name]
    alias = getattr(upstream_names, name)
    assert alias is own
    assert positional(alias) == arguments.split()
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(alias).parameters.items()
    assert KEYWORDS.get(name, set()) <= {key for key, one in parameters if one.kind is keyword_only}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_takes_upstreams_samples_and_operands_in_order(name):
    own, samples, operands = CLASSES[name]
    alias = getattr(upstream_names, name)
    assert alias is own
    plain = {"geometry", "history_frames"}
    wanted = [one if one in plain else f"sample_{one}" for one in samples.split()]
    assert positional(alias) == wanted
    wanted = (operands or f"{samples} current_stream").split()
    got = positional(alias.execute)
    if operands is None or "current_stream" not in operands:
        wanted = [one for one in wanted if one != "current_stream"] + ["current_stream"]
    assert got[: len(wanted)] == wanted, "what is added goes last"


def test_the_blocks_knobs_have_upstreams_names():
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(upstream_names.GatedAttentionBlockFwd).parameters.items()
    knobs = [key for key, one in parameters if one.kind is keyword_only]
    assert knobs[: len(BLOCK_KNOBS.split())] == BLOCK_KNOBS.split()


@pytest.mark.parametrize("name", FIELDS)
def test_a_spec_has_upstreams_fields_in_order(name):
    own, fields = FIELDS[name]
    alias = getattr(upstream_names, name)
    assert alias is own
    wanted = fields.split()
    assert [field.name for field in dataclasses.fields(alias)][: len(wanted)] == wanted


def test_the_weight_builder_takes_upstreams_order():
    """The names differ, the order does not: callers pass six positions."""
    assert upstream_names.qkvg_from_hf is cudnn_blocks.qkvg_from_hf
    wanted = ["q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "geometry"]
    assert positional(upstream_names.qkvg_from_hf) == wanted


def test_enums_and_constants():
    bands = {"Q": 0, "GATE": 1, "K": 2, "V": 3}
    assert {band.name: band.value for band in upstream_names.ProjBlock} == bands
    formats = {one.name: (one.fmt_name, one.block_size) for one in upstream_names.Fp4Format}
    assert formats == {"NVFP4": ("nvfp4", 16), "MXFP4": ("mxfp4", 32)}
    assert upstream_names.QKVG_TILE_ALIGN == 64
    assert upstream_names.ops.causal_conv1d_update is upstream_names.causal_conv1d_update


def test_the_module_holds_imports_and_names_only():
    tree = ast.parse(inspect.getsource(upstream_names))
    docstring, *body = tree.body
    assert isinstance(docstring, ast.Expr)
    *imports, names = body
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    assert isinstance(names, ast.Assign)


def test_upstreams_quick_start_runs_with_one_import_changed():
    from cudnn_blocks.integrations import upstream_names as cudnn

    x = torch.randn(8, 64, dtype=torch.bfloat16)
    weight = torch.randn(64, 4, dtype=torch.bfloat16)
    conv_state = torch.randn(8, 64, 4, dtype=torch.bfloat16)
    before = conv_state.clone()
    output = cudnn.ops.causal_conv1d_update(x, conv_state, weight, bias=None, activation="silu")
    assert output.shape == x.shape
    assert torch.equal(conv_state[..., :-1], before[..., 1:])
    assert torch.equal(conv_state[..., -1], x)
    packed = cudnn.pack_conv3d_weight_sm100(torch.randn(16, 16, 3, 3, 3, dtype=torch.bfloat16))
    assert packed.shape == (16, 3, 3, 3, 64)
