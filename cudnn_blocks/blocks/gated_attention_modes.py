# SPDX-License-Identifier: Apache-2.0
"""The modes of the gated attention block as data: stages, what each takes, workspace regions."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from cudnn_blocks.errors import NotServedError
from cudnn_blocks.workspace import ENGINE_SCRATCH

PROJ, PROJ_NORM_ROPE = "qkv_gate_proj", "qkv_gate_proj_norm_rope"
NORM_ROPE, SDPA, GATE, OUT_PROJ = "qk_norm_rope", "sdpa", "sigmoid_gate", "out_proj"
QUANTIZE_Q, QUANTIZE_KV, QUANTIZE_O = "quantize_q", "quantize_kv", "quantize_o"
QUANTIZE_MX_Q, QUANTIZE_MX_K = "quantize_mxfp8_q", "quantize_mxfp8_k"
QUANTIZE_MX_V, QUANTIZE_FP4_O = "quantize_mxfp8_v", "quantize_fp4_o"
PROJ_REGION, O_REGION = "proj", "o"

Names = tuple[str | None, ...]


class Precision(enum.Enum):
    """What the operands are; the value is how an error message calls it."""

    ACTIVATION = "None"
    FP8 = "per-tensor FP8"
    MX = "MXFP8"
    MX_FP4_O = "MXFP8 with an FP4 output"

    @property
    def is_block_scaled(self) -> bool:
        """True where h and W_qkvg have scale blobs."""
        return self in (Precision.MX, Precision.MX_FP4_O)


@dataclass(frozen=True)
class Mode:
    """One pipeline, but for sizes."""

    takes: Mapping[str, Names]
    """Stages in launch order, each with its operands by name; None where it is given none."""
    regions: tuple[str, ...]
    """Of the workspace, in order."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Stage names in launch order."""
        return tuple(self.takes)


_SMALL = ("w_q_norm", "w_k_norm", "cos", "sin")
_NORM_ROPE: Mapping[str, Names] = {NORM_ROPE: ("q", "k", *_SMALL)}
_GATE: Mapping[str, Names] = {GATE: ("o", "gate", "o")}
_LAST = ("lse", "seq_lens")

# BF16 and FP16: the knobs are independent.
_PROJ: Mapping[str, Names] = {PROJ: ("h", "w_qkvg", "proj")}
_PROJ_FUSED: Mapping[str, Names] = {PROJ_NORM_ROPE: ("h", "w_qkvg", "proj", *_SMALL)}
_SDPA: Mapping[str, Names] = {SDPA: ("q", "k", "v", "o", None, *_LAST)}
_SDPA_FUSED: Mapping[str, Names] = {SDPA: ("q", "k", "v", "o", "gate", *_LAST)}
_OUT: Mapping[str, Names] = {OUT_PROJ: ("o_rows", "w_o", "out")}
_SLAB = (PROJ_REGION, O_REGION)

# Quantised: q, k and v in codes, with their scale blobs where they are block-scaled.
_LAST_8 = (*_LAST, ENGINE_SCRATCH)
_QKV = ("q8", "k8", "v8")
_MX_QKV, _SF_QKV = ("q8", "sf_q", "k8", "sf_k", "v8", "sf_v"), ("sf_q", "sf_k", "sf_v")
_MX_H: Names = ("h", "h_sf", "w_qkvg", "w_qkvg_sf")
_MX_PROJ: Mapping[str, Names] = {PROJ: (*_MX_H, "proj", ENGINE_SCRATCH)}
_MX_PROJ_FUSED: Mapping[str, Names] = {
    PROJ_NORM_ROPE: (*_MX_H, *_MX_QKV, "gate16", *_SMALL, "seq_lens", ENGINE_SCRATCH)
}
_QUANTIZE_MX: Mapping[str, Names] = {
    QUANTIZE_MX_Q: ("q", "q8", "sf_q"),
    QUANTIZE_MX_K: ("k", "k8", "sf_k"),
    QUANTIZE_MX_V: ("v", "v8", "sf_v", "seq_lens"),
}
_MX_SDPA: Mapping[str, Names] = {SDPA: (*_MX_QKV, "o", None, *_LAST_8)}
_OUT_8: Mapping[str, Names] = {OUT_PROJ: ("o8_rows", "w_o", "out")}
_FP4_O: Mapping[str, Names] = {
    QUANTIZE_FP4_O: ("o_rows", "o4", "sf_o"),
    OUT_PROJ: ("o4", "sf_o", "w_o", "w_o_sf", "out", ENGINE_SCRATCH),
}
_QUANTIZE_O: Mapping[str, Names] = {QUANTIZE_O: ("o", "o8")}

MODES: Mapping[tuple[Precision, bool, bool], Mode] = {
    (Precision.ACTIVATION, False, False): Mode(
        {**_PROJ, **_NORM_ROPE, **_SDPA, **_GATE, **_OUT}, _SLAB
    ),
    (Precision.ACTIVATION, True, False): Mode({**_PROJ_FUSED, **_SDPA, **_GATE, **_OUT}, _SLAB),
    (Precision.ACTIVATION, False, True): Mode(
        {**_PROJ, **_NORM_ROPE, **_SDPA_FUSED, **_OUT}, _SLAB
    ),
    (Precision.ACTIVATION, True, True): Mode({**_PROJ_FUSED, **_SDPA_FUSED, **_OUT}, _SLAB),
    (Precision.FP8, False, False): Mode(
        {
            **_PROJ,
            **_NORM_ROPE,
            QUANTIZE_Q: ("q", "q8"),
            QUANTIZE_KV: ("k", "k8", "v", "v8"),
            SDPA: (*_QKV, "o", None, *_LAST_8),
            **_GATE,
            **_QUANTIZE_O,
            **_OUT_8,
        },
        ("proj", *_QKV, "o", "o8"),
    ),
    (Precision.FP8, True, True): Mode(
        {
            PROJ_NORM_ROPE: ("h", "w_qkvg", *_QKV, "gate16", *_SMALL),
            SDPA: (*_QKV, "o8", "gate16", *_LAST_8),
            **_OUT_8,
        },
        (*_QKV, "gate16", "o8"),
    ),
    (Precision.MX, False, False): Mode(
        {**_MX_PROJ, **_NORM_ROPE, **_QUANTIZE_MX, **_MX_SDPA, **_GATE, **_QUANTIZE_O, **_OUT_8},
        ("proj", *_QKV, "o", "o8", *_SF_QKV),
    ),
    (Precision.MX, True, True): Mode(
        {**_MX_PROJ_FUSED, SDPA: (*_MX_QKV, "o8", "gate16", *_LAST_8), **_OUT_8},
        (*_QKV, "gate16", "o8", *_SF_QKV),
    ),
    (Precision.MX_FP4_O, False, False): Mode(
        {**_MX_PROJ, **_NORM_ROPE, **_QUANTIZE_MX, **_MX_SDPA, **_GATE, **_FP4_O},
        ("proj", *_QKV, "o", *_SF_QKV, "o4", "sf_o"),
    ),
    (Precision.MX_FP4_O, True, True): Mode(
        {**_MX_PROJ_FUSED, SDPA: (*_MX_QKV, "o", "gate16", *_LAST_8), **_FP4_O},
        (*_QKV, "gate16", "o", *_SF_QKV, "o4", "sf_o"),
    ),
}
"""``(precision, fuse_norm_rope, fuse_gate)`` to the mode; quantised, both knobs or neither."""


def mode_of(precision: Precision, *, fuse_norm_rope: bool, fuse_gate: bool) -> Mode:
    """The mode; NotServedError naming both knobs where a quantised one has one of them alone."""
    mode = MODES.get((precision, fuse_norm_rope, fuse_gate))
    if mode is None:
        raise NotServedError(
            "gated-attention-block",
            f"fuse_norm_rope={fuse_norm_rope} with fuse_gate={fuse_gate} in {precision.value}",
            "both knobs or neither",
        )
    return mode
