# SPDX-License-Identifier: Apache-2.0
"""The builders of W_qkvg: rows land where the bands say, bit for bit."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import (
    ContractError,
    GatedAttentionGeometry,
    ProjBlock,
    build_fused_qkvg_weight,
    qkvg_from_hf,
)

GEOMETRY = GatedAttentionGeometry(d_model=16, h_q=4, h_kv=2, d_head=32, rope_dim=8)


def labelled(band: str, heads: int) -> torch.Tensor:
    """Every row says its band, head and channel in its first three columns."""
    weight = torch.zeros(heads * GEOMETRY.d_head, GEOMETRY.d_model)
    weight[:, 0] = "QGKV".index(band)
    weight[:, 1] = torch.arange(heads).repeat_interleave(GEOMETRY.d_head)
    weight[:, 2] = torch.arange(GEOMETRY.d_head).repeat(heads)
    return weight


Q, GATE, K, V = (labelled(band, heads) for band, heads in zip("QGKV", (4, 4, 2, 2), strict=True))


def per_head() -> torch.Tensor:
    """As a checkpoint has it: query of head 0, gate of head 0, query of head 1 ..."""
    rows = []
    for head in range(GEOMETRY.h_q):
        part = slice(head * GEOMETRY.d_head, (head + 1) * GEOMETRY.d_head)
        rows += [Q[part], GATE[part]]
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("w_q_gate", "layout"), [(torch.cat([Q, GATE]), "flat"), (per_head(), "per_head")]
)
def test_rows_are_in_bands_head_major(w_q_gate, layout):
    w_qkvg = build_fused_qkvg_weight(w_q_gate, K, V, GEOMETRY, q_gate_layout=layout)
    assert w_qkvg.is_contiguous()
    assert w_qkvg.shape == (GEOMETRY.n_qkvg, GEOMETRY.d_model)
    for band in ProjBlock:
        start, heads = GEOMETRY.qkvg_offsets[band], GEOMETRY.qkvg_heads[band]
        for head in range(heads):
            for channel in (0, 1, GEOMETRY.d_head - 1):
                row = w_qkvg[start + head * GEOMETRY.d_head + channel]
                assert row[:3].tolist() == [band, head, channel]


def test_the_two_layouts_differ_in_every_head_but_the_first():
    """S20: the wrong layout gives a plausible weight whose first head is right."""
    weight = per_head()
    right = build_fused_qkvg_weight(weight, K, V, GEOMETRY, q_gate_layout="per_head")
    wrong = build_fused_qkvg_weight(weight, K, V, GEOMETRY, q_gate_layout="flat")
    assert torch.equal(right[: GEOMETRY.d_head], wrong[: GEOMETRY.d_head])
    assert not torch.equal(right, wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_move_bit_for_bit_into_new_memory(dtype):
    weights = [torch.randn(rows, 16).to(dtype) for rows in (256, 64, 64)]
    w_qkvg = build_fused_qkvg_weight(*weights, GEOMETRY, q_gate_layout="flat")
    assert w_qkvg.dtype == dtype
    assert torch.equal(w_qkvg, torch.cat(weights))
    assert w_qkvg.data_ptr() not in {weight.data_ptr() for weight in weights}


def test_strided_weights_are_read_as_they_are():
    wide = torch.randn(256, 40)
    strided, compact = wide[:, 4:20], wide[:, 4:20].contiguous()
    one, other = (
        build_fused_qkvg_weight(w, K, V, GEOMETRY, q_gate_layout="per_head")
        for w in (strided, compact)
    )
    assert torch.equal(one, other)


def test_from_hugging_face_folds_the_zero_centred_norm_weights():
    q_norm, k_norm = torch.randn(32), torch.randn(32)
    weights = qkvg_from_hf(per_head(), K, V, q_norm, k_norm, GEOMETRY)
    expected = build_fused_qkvg_weight(per_head(), K, V, GEOMETRY, q_gate_layout="per_head")
    assert torch.equal(weights.w_qkvg, expected)
    assert torch.equal(weights.w_q_norm, 1 + q_norm)
    assert torch.equal(weights.w_k_norm, 1 + k_norm)


def test_the_fold_is_rounded_once():
    """1 + 2**-9 in BF16 is 1; FP32 norm weights lose nothing before the sum."""
    projections = [w.bfloat16() for w in (per_head(), K, V)]
    for norm, expected in ((2.0**-9, 1.0), (3 * 2.0**-9, 1 + 2.0**-7), (-1.0, 0.0)):
        w = torch.full((32,), norm)
        weights = qkvg_from_hf(*projections, w, w, GEOMETRY)
        assert weights.w_q_norm.dtype == torch.bfloat16
        assert weights.w_q_norm.tolist() == [expected] * 32


@pytest.mark.parametrize("layout", ["interleaved", "", None, 0])
def test_unknown_layouts(layout):
    with pytest.raises(ContractError, match='^q_gate_layout: expected "flat" or "per_head", got'):
        build_fused_qkvg_weight(per_head(), K, V, GEOMETRY, q_gate_layout=layout)


def test_the_layout_has_no_default():
    with pytest.raises(TypeError, match="q_gate_layout"):
        build_fused_qkvg_weight(per_head(), K, V, GEOMETRY)


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ((Q, K, V), r"^w_q_gate: expected shape \[256, 16\], got \[128, 16\]"),
        ((per_head(), Q, V), r"^w_k: expected shape \[64, 16\], got \[128, 16\]"),
        ((per_head(), K, V[:, :8]), r"^w_v: expected shape \[64, 16\], got \[64, 8\]"),
        ((per_head(), K.bfloat16(), V), r"^w_k: expected dtype torch.float32, as w_q_gate"),
        ((per_head(), K, V.to("meta")), "^w_v: expected a tensor on cpu, as w_q_gate"),
    ],
)
def test_weights_that_do_not_fit(weights, match):
    with pytest.raises(ContractError, match=match):
        build_fused_qkvg_weight(*weights, GEOMETRY, q_gate_layout="per_head")


def test_checkpoint_names_in_errors():
    norm = torch.zeros(32)
    for index, name in enumerate(["q_proj", "k_proj", "v_proj", "q_norm", "k_norm"]):
        arguments = [per_head(), K, V, norm, norm]
        arguments[index] = arguments[index][:-1]
        with pytest.raises(ContractError, match=f"^{name}: expected shape"):
            qkvg_from_hf(*arguments, GEOMETRY)
        arguments[index] = None
        with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got NoneType"):
            qkvg_from_hf(*arguments, GEOMETRY)


def test_bad_geometry():
    bad = GatedAttentionGeometry(d_model=16, h_q=3, h_kv=2, d_head=32, rope_dim=8)
    with pytest.raises(ContractError, match="^h_q: expected a multiple"):
        build_fused_qkvg_weight(per_head(), K, V, bad, q_gate_layout="flat")
