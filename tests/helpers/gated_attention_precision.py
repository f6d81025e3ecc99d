# SPDX-License-Identifier: Apache-2.0
"""Quantised operands of the gated attention block, and what has to come out of each mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cudnn_blocks import Fp4Format, GatedAttentionGeometry, MxQuantSpec, QuantSpec
from tests.helpers.gated_attention_problem import READ, GatedProblem, make_problem
from tests.oracles import gated_attention_precision_reference as oracle

BLOBS = ("h_sf", "w_qkvg_sf", "w_o_sf")
FUSED = {"fuse_norm_rope": True, "fuse_gate": True}
UNFUSED = {"fuse_norm_rope": False, "fuse_gate": False}
E2M1_X2 = torch.float4_e2m1fn_x2


@dataclass(frozen=True)
class PrecisionMode:
    """A precision with its knobs."""

    output: str
    """How the out projection takes O: ``fp8`` for the per-tensor mode, else the oracle's name."""
    w_qkvg: str = "mxfp8"
    """Of a block-scaled mode."""
    fused: bool = False

    @property
    def is_per_tensor(self) -> bool:
        return self.output == "fp8"

    @property
    def has_fp4_output(self) -> bool:
        return self.output in ("nvfp4", "mxfp4")

    @property
    def knobs(self) -> dict[str, bool]:
        return FUSED if self.fused else UNFUSED

    @property
    def cosine(self) -> float:
        """What the similarity to the exact layer exceeds."""
        return 0.98 if self.has_fp4_output else 0.99


_KINDS = {
    "fp8": PrecisionMode("fp8"),
    "mxfp8": PrecisionMode("mxfp8"),
    "mxfp4-weights": PrecisionMode("mxfp8", "mxfp4"),
    "nvfp4-output": PrecisionMode("nvfp4"),
    "mxfp4-output": PrecisionMode("mxfp4", "mxfp4"),
}
MODES = {
    **_KINDS,
    **{f"{name}-fused": replace(mode, fused=True) for name, mode in _KINDS.items()},
}
D128 = GatedAttentionGeometry(d_model=128, h_q=4, h_kv=2, d_head=128, rope_dim=32)


@dataclass(frozen=True)
class PrecisionProblem(GatedProblem):
    """One call of a precision mode."""

    mode: PrecisionMode = MODES["fp8"]
    quant: QuantSpec | MxQuantSpec | None = None

    @property
    def plan_knobs(self) -> dict[str, Any]:
        blobs = {f"sample_{name}": self.operands[name] for name in BLOBS if name in self.operands}
        return {**super().plan_knobs, "quant": self.quant, **blobs}

    def expected_at(self, points: oracle.Points | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and LSE of the FP64 oracle with these rounding points; None for none at all."""
        on_cpu = self.to("cpu")
        seq_lens = on_cpu.operands["seq_lens"]
        return oracle.gated_attention(
            *(on_cpu.real(name) for name in READ),
            self.geometry,
            None if seq_lens is None else seq_lens.tolist(),
            points,
        )

    def real(self, name: str) -> torch.Tensor | None:
        """The values that an operand stands for."""
        kinds = {"h": "mxfp8", "w_qkvg": self.mode.w_qkvg, "w_o": self.mode.output}
        if f"{name}_sf" in self.operands:
            return dequantise(self[name], self[f"{name}_sf"], kinds[name])
        if name in kinds:
            return self[name].double() * getattr(self.quant, f"descale_{name}")
        return self.operands[name]

    @property
    def points(self) -> oracle.Points:
        """The mode's stated rounding points."""
        scales = {
            n: getattr(self.quant, n, 1.0) for n in ("scale_q", "scale_k", "scale_v", "scale_o")
        }
        output = self.mode.output
        return oracle.stated_points(output, fused=self.mode.fused, scales=scales)


FORMATS = {"mxfp8": (32, 448.0, True), "mxfp4": (32, 6.0, True), "nvfp4": (16, 6.0, False)}
"""Elements of a block, largest code, and whether scales are powers of two."""
_LEVELS = torch.tensor(oracle.E2M1, dtype=torch.float64)


def quantise(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and flat blob of ``[..., K]`` in a block format."""
    block, largest, has_e8m0 = FORMATS[kind]
    blocked = x.double().unflatten(-1, (-1, block))
    scale = oracle.block_scales(blocked.abs().amax(-1), largest, has_e8m0=has_e8m0)
    unscaled = (blocked / scale.unsqueeze(-1)).flatten(-2)
    if has_e8m0:
        scale_bytes = (torch.log2(scale) + 127).to(torch.uint8)
    else:
        scale_bytes = scale.float().to(torch.float8_e4m3fn).view(torch.uint8)
    blob = oracle.make_blob(scale_bytes.flatten(0, -2))
    if kind == "mxfp8":
        return oracle.e4m3(unscaled).float().to(torch.float8_e4m3fn), blob
    nearest = oracle.e2m1(unscaled)
    nibbles = torch.searchsorted(_LEVELS, nearest.abs()) + 8 * torch.signbit(nearest)
    packed = (nibbles[..., ::2] + 16 * nibbles[..., 1::2]).to(torch.uint8)
    return packed, blob


def dequantise(codes: torch.Tensor, blob: torch.Tensor, kind: str) -> torch.Tensor:
    """The values of ``[..., K]`` codes under one flat blob."""
    block, _, has_e8m0 = FORMATS[kind]
    if kind == "mxfp8":
        values = codes.double()
    else:
        packed = codes.view(torch.uint8).int()
        nibbles = torch.stack((packed % 16, packed // 16), -1).flatten(-2)
        values = _LEVELS[nibbles % 8] * torch.where(nibbles > 7, -1.0, 1.0)
    rows, columns = values.shape[:-1].numel(), values.shape[-1] // block
    places = oracle.blob_offset(torch.arange(rows)[:, None], torch.arange(columns), columns)
    scale_bytes = blob.view(torch.uint8)[places]
    if has_e8m0:
        exact = torch.exp2(scale_bytes.double() - 127)
        scale = torch.where(scale_bytes == 255, torch.nan, exact)
    else:
        scale = scale_bytes.view(torch.float8_e4m3fn).double()
    scaled = values.unflatten(-1, (-1, block)) * scale.view(*values.shape[:-1], columns, 1)
    return scaled.flatten(-2)


def quantise_per_tensor(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Codes of x times scale."""
    return oracle.e4m3(x.double() * scale).float().to(torch.float8_e4m3fn)


def make_precision_problem(
    mode: PrecisionMode,
    geometry: GatedAttentionGeometry = D128,
    batch: int = 2,
    tokens: int = 8,
    *,
    device: torch.device | str = "cpu",
    seq_lens: Sequence[int] | None = None,
    has_lse: bool = False,
    table_rows: int | None = None,
) -> PrecisionProblem:
    """Random operands near 1, in the codes of the mode; scales that use the range of e4m3."""
    plain = make_problem(
        geometry, batch, tokens, seq_lens=seq_lens, has_lse=has_lse, table_rows=table_rows
    )
    operands = dict(plain.operands)
    weight_scale = 448 / 6 * geometry.d_model**0.5
    w_o_scale = 448 / 6 * geometry.attn_width**0.5
    if mode.is_per_tensor:
        scales = {"h": 64.0, "w_qkvg": weight_scale, "w_o": w_o_scale}
        descales = {f"descale_{name}": 1 / scale for name, scale in scales.items()}
        quant: QuantSpec | MxQuantSpec = QuantSpec(
            **descales, scale_q=24.0, scale_k=28.0, scale_v=72.0, scale_o=96.0
        )
        for name, scale in scales.items():
            operands[name] = quantise_per_tensor(plain[name], scale)
    else:
        formats = {"h": "mxfp8", "w_qkvg": mode.w_qkvg}
        w_qkvg_dtype = E2M1_X2 if mode.w_qkvg == "mxfp4" else torch.float8_e4m3fn
        if mode.output == "mxfp8":
            quant = MxQuantSpec(descale_w_o=1 / w_o_scale, scale_o=96.0, w_qkvg_dtype=w_qkvg_dtype)
            operands["w_o"] = quantise_per_tensor(plain["w_o"], w_o_scale)
        else:
            o_fp4 = Fp4Format[mode.output.upper()]
            quant = MxQuantSpec(descale_w_o=1.0, w_qkvg_dtype=w_qkvg_dtype, o_fp4=o_fp4)
            formats["w_o"] = mode.output
        for name, kind in formats.items():
            operands[name], operands[f"{name}_sf"] = quantise(plain[name], kind)
    problem = PrecisionProblem(geometry, operands, dict(mode.knobs), mode, quant)
    return problem if str(device) == "cpu" else problem.to(device)


def cosine(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Similarity of all elements as one vector."""
    a, b = actual.double().cpu().flatten(), expected.double().cpu().flatten()
    return float(a @ b / (a.norm() * b.norm()))


MEAN_ERROR, WORST_ERROR = 0.005, 0.05
"""Of an element, in units of the result's root mean square. The result's own rounding is up to
0.016 of them; sums in another order move a value over the border of a code now and then, which is
a step of 1/16 of one of many summands."""
MEAN_LSE_ERROR, WORST_LSE_ERROR = 4e-3, 0.02
"""Such a step moves one of the ``d_head`` summands of a score, 1 in size, by up to 1/8; where a row
has one key alone, nothing averages it out."""
GPU_SLACK = 5.0
"""Kernels round the weights of keys relative to a running maximum, not that of the row: half a step
of 1 in 8 to 1 in 16 each, whatever the row's own rounding is."""


def assert_close_to_stated(problem: PrecisionProblem, slack: float = 1.0) -> None:
    """Every element of ``out``, and ``lse``, near the oracle at the stated rounding points."""
    stated, lse = problem.expected_at(problem.points)
    got = problem["out"].double().cpu()
    assert bool(got.isfinite().all()), "out: not finite"
    scale = stated.square().mean().sqrt() + 1e-30
    assert_small((got - stated) / scale, MEAN_ERROR * slack, WORST_ERROR * slack, "out")
    if problem.operands["lse"] is not None:
        assert_lse_near(problem["lse"], lse, slack)


def assert_lse_near(actual: torch.Tensor, expected: torch.Tensor, slack: float = 1.0) -> None:
    """Rows without a key exactly -inf, the others near."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    dead = expected == -math.inf
    assert torch.equal(actual == -math.inf, dead), "lse: other rows have no key"
    error = (actual - expected)[~dead]
    assert_small(error, MEAN_LSE_ERROR * slack, WORST_LSE_ERROR * slack, "lse")


def assert_small(error: torch.Tensor, mean: float, worst: float, name: str) -> None:
    """The root of the mean square, and the worst."""
    if not error.numel():
        return
    got_mean, got_worst = error.square().mean().sqrt().item(), error.abs().max().item()
    assert got_mean <= mean, f"{name}: off by {got_mean} in the mean"
    assert got_worst <= worst, f"{name}: off by {got_worst} at worst"
