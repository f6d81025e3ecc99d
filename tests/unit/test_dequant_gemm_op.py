# SPDX-License-Identifier: Apache-2.0
"""DequantGemm on the reference engine: results, served sizes, scratch, refusals."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import ContractError, DequantGemm, NotServedError, Target, TensorSpec, ops
from cudnn_blocks.quant_spec import BLOCK_FORMATS
from cudnn_blocks.reference.dequant_gemm import dequant_gemm
from cudnn_blocks.reference.scale_blobs import blob_bytes
from cudnn_blocks.stages.dequant_gemm.stage import DecodeStage, DequantGemmModes, DequantGemmStage
from cudnn_blocks.stages.gemm.stage import GemmStage
from cudnn_blocks.stages.quantize.stage import DequantizeStage
from tests.helpers.dequant_gemm_problem import make_dequant_gemm, poisoned_blob

FORMATS = tuple(BLOCK_FORMATS)


def spec_plan(rows, n=9216, k=2048, w_format="mxfp4", x_format=None, **knobs):
    w = BLOCK_FORMATS[w_format]
    x_sf, x = None, TensorSpec.contiguous((1, rows, k), torch.bfloat16)
    if x_format is not None:
        one = BLOCK_FORMATS[x_format]
        x = TensorSpec.contiguous((1, rows, k // one.codes_per_byte), torch.uint8)
        x_sf = TensorSpec.contiguous((blob_bytes(rows, k // one.block_size),), torch.uint8)
    return DequantGemm(
        x,
        TensorSpec.contiguous((n, k // w.codes_per_byte), torch.uint8),
        TensorSpec.contiguous((blob_bytes(n, k // w.block_size),), torch.uint8),
        TensorSpec.contiguous((1, rows, n), torch.bfloat16),
        w_format=w_format,
        sample_x_sf=x_sf,
        x_format=x_format,
        **knobs,
    )


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("x_format", [None, "mxfp8"])
def test_runs_on_a_cpu(fmt, x_format):
    problem = make_dequant_gemm(fmt, x_format=x_format)
    assert torch.equal(problem.run(), problem.expected())


def test_typed_codes_and_bytes_are_the_same():
    problem = make_dequant_gemm("nvfp4")
    one = BLOCK_FORMATS["nvfp4"]
    w, w_sf = problem.operands["w"], problem.operands["w_sf"]
    typed = problem.with_(w=w.view(one.code_dtype), w_sf=w_sf.view(one.scale_dtype))
    assert torch.equal(typed.run(), problem.expected())


def test_functional_allocates_its_result():
    problem = make_dequant_gemm("mxfp4")
    x, w, w_sf = (problem.operands[name] for name in ("x", "w", "w_sf"))
    y = ops.dequant_gemm(x, w, w_sf, "mxfp4", alpha=problem.alpha)
    assert torch.equal(y, problem.expected())


@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_scale_stays_in_its_column(fmt):
    problem = make_dequant_gemm(fmt)
    clean = problem.expected()
    one = BLOCK_FORMATS[fmt]
    scales = torch.ones(136, 96 // one.block_size, dtype=torch.uint8)
    place = poisoned_blob(scales.index_fill(0, torch.tensor([77]), 7)) == 7
    nan = 0x7F if fmt == "nvfp4" else 0xFF
    w_sf = problem.operands["w_sf"].masked_fill(place, nan)
    y = problem.with_(w_sf=w_sf).run()
    assert y[..., 77].isnan().all()
    others = [n for n in range(136) if n != 77]
    assert torch.equal(y[..., others], clean[..., others])


@pytest.mark.parametrize(
    ("rows", "x_format", "scratch"),
    [
        (128, None, 0),
        (129, None, 9216 * 2048 * 2),
        (16, "mxfp8", 16 * 2048 * 2),
        (256, "nvfp4", (256 + 9216) * 2048 * 2),
    ],
)
def test_scratch_holds_what_becomes_bf16(rows, x_format, scratch):
    plan = spec_plan(rows, x_format=x_format, target="sm_90a")
    plan.check_support()
    assert plan.get_workspace_size() == scratch


def test_few_rows_take_the_kernel_of_codes():
    plans = [spec_plan(rows, target="sm_90a") for rows in (1, 128, 129)]
    for plan in plans:
        plan.check_support()
    few, most, many = (plan.describe() for plan in plans)
    assert "8 tokens" in few
    assert "32 tokens" in most
    assert "in scratch" in many


@pytest.mark.parametrize(
    ("change", "match"), [({"n": 12}, "n=12"), ({"w_format": "nvfp4", "k": 48}, "k=48")]
)
def test_declines_sizes_without_a_row(change, match):
    with pytest.raises(NotServedError, match=match):
        spec_plan(4, **change, target="sm_90a").check_support()


def test_refuses_an_unknown_format():
    problem = make_dequant_gemm("mxfp4")
    with pytest.raises(ContractError, match="fmt"):
        problem.plan(w_format="mxfp6")


@pytest.mark.parametrize("name", ["w_sf", "x_sf"])
def test_refuses_a_wrong_blob(name):
    problem = make_dequant_gemm("mxfp4", x_format="mxfp8")
    short = problem.with_(**{name: problem.operands[name][:-16]})
    with pytest.raises(ContractError, match=name):
        short.plan().check_support()


def test_refuses_a_superfluous_blob():
    problem = make_dequant_gemm("mxfp4")
    plan = problem.plan()
    plan.compile()
    with pytest.raises(ContractError, match="x_sf"):
        plan.execute(**{**problem.operands, "x_sf": problem.operands["w_sf"]})


def test_refuses_k_that_is_no_whole_block():
    with pytest.raises(ContractError, match="K"):
        spec_plan(4, k=40).check_support()


@pytest.mark.parametrize("rows", [5, 200])
@pytest.mark.parametrize("x_format", [None, "mxfp8"])
def test_the_launches_hand_values_on_through_the_scratch(monkeypatch, rows, x_format):
    """The parts of the GPU engines, each run by its reference."""
    problem = make_dequant_gemm("nvfp4", (1, rows, 72, 64), x_format=x_format)
    names = ("x", "x_sf", "w", "w_sf", "y")
    x, x_sf, w, w_sf, y = (problem.operands.get(name) for name in names)
    launched = []

    def by_reference(part, operands, stream):
        launched.append(type(part).__name__)
        part.run_reference(operands)

    def decode(part, operands, stream):
        launched.append(type(part).__name__)
        x, w, w_sf, y = operands
        dequant_gemm(x, None, w, w_sf, y, part.alpha, None, BLOCK_FORMATS["nvfp4"])

    for kind in (DequantizeStage, GemmStage):
        monkeypatch.setattr(kind, "launch", by_reference)
    monkeypatch.setattr(DecodeStage, "launch", decode)
    n, k = y.shape[-1], x.shape[-1]
    one = None if x_format is None else BLOCK_FORMATS[x_format]
    modes = DequantGemmModes(n, k, BLOCK_FORMATS["nvfp4"], one)
    stage = DequantGemmStage("product", modes, rows, Target.parse("sm_90a"), alpha=problem.alpha)
    stage.check()
    scratch = torch.full((stage.scratch_bytes,), 0xFF, dtype=torch.uint8)
    stage.launch((x, x_sf, w, w_sf, y, scratch), 0)
    assert launched == ["DequantizeStage"] * (len(launched) - 1) + [
        "DecodeStage" if rows == 5 else "GemmStage"
    ]
    assert len(launched) == 1 + (one is not None) + (rows > 128)
    assert torch.equal(y, problem.expected())
