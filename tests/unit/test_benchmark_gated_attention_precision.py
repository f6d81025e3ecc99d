# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the precision modes: its grid, its goals, its bytes, its arms on the CPU."""

from __future__ import annotations

import fnmatch

import pytest
import torch

from benchmarks.gated_attention_block.peers import COMPILED
from benchmarks.gated_attention_precision import BENCH, bench, cases, peers
from benchmarks.gated_attention_precision.bench import (
    Fp8GemmCase,
    Fp8SdpaCase,
    PrecisionBlockCase,
    QuantizeCase,
)
from benchmarks.gated_attention_precision.block_problem import PrecisionBlockProblem
from benchmarks.gated_attention_precision.gemm_problem import Fp8GemmProblem
from benchmarks.gated_attention_precision.ours import BF16_FUSED, OURS_FAST
from benchmarks.gated_attention_precision.peers import (
    CUBLAS_BF16,
    FA3_FP8,
    SCALED_MM_FAST,
    SCALED_MM_PROMOTED,
)
from benchmarks.gated_attention_precision.quantize_problem import QuantizeProblem
from benchmarks.gated_attention_precision.sdpa_problem import Fp8SdpaProblem
from benchmarks.harness.arm import Arm, Role
from benchmarks.harness.case import Lab, select
from benchmarks.harness.precompile import kernels_of
from cudnn_blocks import GatedAttentionGeometry
from cudnn_blocks.stages.kernel_cache import KERNELS
from cudnn_blocks.target import Target

torch.set_num_threads(1)  # sizes are small: threads would only wait for one another

LAB = Lab(rounds=1, l2_bytes=60 << 20, ceiling_gb_s=None, timer=None, check_only=True)
GEOMETRY = GatedAttentionGeometry(256, h_q=4, h_kv=2, d_head=128, rope_dim=32)
PRECISIONS = (*cases.TOKENS, "mxfp4-output")
FAMILIES = {
    "block": PrecisionBlockCase,
    "gemm": Fp8GemmCase,
    "quantize": QuantizeCase,
    "sdpa": Fp8SdpaCase,
}
QUANTIZE = [
    QuantizeProblem("fp8", 70, 2, 64),
    QuantizeProblem("mxfp8", 70, 2, 64),
    QuantizeProblem("mxfp8", 70, 2, 64, along_tokens=True),
    QuantizeProblem("nvfp4", 70, 2, 64),
]


def problem(precision: str, geometry=GEOMETRY, tokens: int = 70) -> PrecisionBlockProblem:
    return PrecisionBlockProblem("small", geometry, tokens, precision)


def test_the_grid_and_its_goal():
    labels = [case.label for case in BENCH.cases]
    assert len(set(labels)) == len(labels)
    modes = {case: case.modes if len(case.modes) > 1 else ("",) for case in BENCH.cases}
    rows = [
        "/".join(filter(None, (case.family, case.name, mode, variant, case.shape)))
        for case in BENCH.cases
        for mode in modes[case]
        for variant in getattr(case, "variants", ("",))
    ]
    found = {goal.case: len(fnmatch.filter(rows, goal.case)) for goal in BENCH.goals}
    assert found == {
        "block/qwen3-next/fp8-fused/*/S8192": 2,
        "gemm/*[0-9]/M*": 12,
        "gemm/*/promoted/M*": 12,
        "gemm/*/fast/M*": 12,
        "sdpa/d256-causal/S*": 3,
    }
    assert [goal.arm for goal in BENCH.goals] == ["ours"] * 3 + [OURS_FAST, "ours"]
    for family, kind in FAMILIES.items():
        chosen = select(BENCH.cases, f"{family}/*", None)
        assert chosen
        assert {type(case) for case in chosen} == {kind}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_is_a_spec_and_suffixes(precision):
    one = problem(precision)
    assert one.is_fused == ("-fused" in precision)
    assert one.quant.fast_accumulation == precision.endswith("-fast")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_check_only_is_right_on_the_reference_engine(precision):
    torch.manual_seed(0)
    outcome = PrecisionBlockCase(problem(precision), "cpu").measure(LAB)
    assert {(row.arm, row.status) for row in outcome.rows} >= {("ours", "ok"), (BF16_FUSED, "ok")}
    assert not outcome.ours_failed
    for row in outcome.rows:
        assert "weights" in row.engine
        assert "workspace" in row.engine


@pytest.mark.parametrize("precision", PRECISIONS)
def test_values_in_bf16_are_those_of_the_codes(precision):
    """The BF16 block is handed the same layer: its values are what codes and scales stand for."""
    torch.manual_seed(0)
    one = problem(precision)
    buffers = one.make_set("cpu")
    for name, std in (("h", 1.0), ("w_qkvg", 256**-0.5), ("w_o", 512**-0.5)):
        assert buffers[name].dtype == torch.bfloat16
        assert 0.4 * std < buffers[name].float().std() < 2.5 * std, name
    if hasattr(one.quant, "descale_h"):
        assert torch.equal(buffers["h_codes"].float() * one.quant.descale_h, buffers["h"].float())


def test_the_attention_of_codes():
    """The peer is a row of its own that says what is missing."""
    torch.manual_seed(0)
    one = Fp8SdpaProblem(4, 2, 64, True, 70)
    outcome = Fp8SdpaCase(one, "cpu").measure(LAB)
    status = {row.arm: row.status for row in outcome.rows}
    assert status["ours"] == "ok"
    assert status[FA3_FP8] == "missing"
    assert one.traffic_bytes == 70 * 64 * (4 + 2 * 2 + 2 * 4)


def test_bytes():
    large = cases.GEOMETRIES[cases.QWEN3_NEXT]
    bf16 = problem("fp8", large).bf16_weight_bytes
    assert bf16 == 2 * 2048 * (9216 + 4096)
    assert problem("fp8-fused", large).weight_bytes == bf16 // 2
    assert problem("mxfp8", large).weight_bytes == bf16 // 2 + 9216 * 64
    assert problem("mxfp4-weights", large).weight_bytes == 2048 * (9216 // 2 + 4096) + 9216 * 64
    nvfp4 = 2048 * (9216 + 2048) + 9216 * 64 + 2048 * 256
    assert problem("nvfp4-output", large).weight_bytes == nvfp4
    assert problem("fp8", large).traffic_bytes > problem("fp8", large).weight_bytes


@pytest.fixture(scope="module")
def product() -> Fp8GemmCase:
    return Fp8GemmCase(Fp8GemmProblem(96, 512, 70), "cpu")


def test_the_product_of_codes(product):
    """Both of torch's are peers and checked; the one of BF16 values takes no part in ratios."""
    torch.manual_seed(0)
    outcome = product.measure(LAB)
    by_case = {}
    for row in outcome.rows:
        assert row.status == "ok"
        by_case.setdefault(row.case.removeprefix("latency/"), []).append(row.arm)
    assert by_case == {
        "96x512/M70": ["ours", SCALED_MM_FAST, SCALED_MM_PROMOTED, CUBLAS_BF16],
        "96x512/promoted/M70": ["ours", SCALED_MM_PROMOTED],
        "96x512/fast/M70": [OURS_FAST, SCALED_MM_FAST],
    }
    offers = product.offers([product.problem.make_set("cpu")], None)
    ours, peer = Role.OURS, Role.PEER
    assert [arm.role for arm in offers] == [
        *(ours, peer, peer, ours, peer, ours, peer),
        Role.YARDSTICK,
    ]
    assert product.check(offers[-1]) is None  # no run checks a yardstick
    for row in outcome.rows:
        weight_bytes = 96 * 512 * (2 if row.arm == CUBLAS_BF16 else 1)
        assert f"weights {weight_bytes / 1e6:.1f} MB, workspace 0.0 MB" in row.engine


def test_a_product_without_its_factor_is_wrong(product):
    torch.manual_seed(0)

    def bind(buffers):
        x, w = (buffers[name].float() for name in ("x8", "w8"))
        return lambda: {"y": (x @ w.t()).bfloat16()}

    wrong = product.check(Arm("ours", Role.OURS, "wrong", bind))
    assert wrong.startswith("y: 64 of 64 sampled rows off")


def test_bytes_of_a_product_and_values_of_its_codes():
    torch.manual_seed(0)
    one = Fp8GemmProblem(128, 256, 8)
    assert one.traffic_bytes == one.footprint_bytes == 8 * 256 + 128 * 256 + 2 * 8 * 128
    buffers = one.make_set("cpu")
    for name in "xw":
        values = buffers[f"{name}8"].float() * buffers[f"descale_{name}"]
        assert torch.equal(values, buffers[name].float())
    assert one.alpha == buffers["descale_x"].item() * buffers["descale_w"].item()
    assert 0.5 < torch.nn.functional.linear(buffers["x"], buffers["w"]).float().std() < 2.0


@pytest.mark.parametrize("one", QUANTIZE, ids=lambda one: one.name)
def test_quantisers_are_compared_by_bits(one, monkeypatch):
    """The peer's steps run uncompiled here."""
    monkeypatch.setattr(peers, "compiled", lambda function: function)
    torch.manual_seed(0)
    case = QuantizeCase(one, "cpu")
    outcome = case.measure(LAB)
    assert {row.arm: row.status for row in outcome.rows} == {"ours": "ok", COMPILED: "missing"}
    peer = peers.compiled_quantizer(one)
    assert case.check(peer) is None

    def bind(buffers):
        def launch():
            one.quantize(buffers["x"], {name: buffers[name] for name in one.results("meta")})
            buffers["codes"].view(torch.uint8).view(-1)[-1] ^= 1

        return launch

    assert "1 of" in case.check(Arm("ours", Role.OURS, "wrong", bind))
    written = sum(results.numel() for results in one.results("meta").values())
    assert one.traffic_bytes == 70 * 2 * 64 * 2 + written


@pytest.mark.parametrize("case", BENCH.cases, ids=lambda one: f"{one.family}/{one.label}")
def test_kernels_of_every_case_are_compiled_ahead(case, monkeypatch):
    monkeypatch.setattr(bench, "_target", lambda: Target.parse("sm_90a"))
    monkeypatch.setattr(KERNELS, "_kernels", {})  # what other tests have compiled is not listed
    for plan in case.plans():
        assert kernels_of([plan])
