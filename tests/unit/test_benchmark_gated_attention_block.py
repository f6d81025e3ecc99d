# SPDX-License-Identifier: Apache-2.0
"""The gated attention benchmark: its grid, its goals, its arithmetic, and its arms on the CPU."""

from __future__ import annotations

import fnmatch
import math
import sys
from types import ModuleType

import pytest
import torch

from benchmarks.gated_attention_block import BENCH, attention_peers, cases, ours, peers
from benchmarks.gated_attention_block.bench import (
    BlockCase,
    GateCase,
    GemmCase,
    HostCase,
    NormRopeCase,
    SdpaCase,
)
from benchmarks.gated_attention_block.block_problem import BlockProblem
from benchmarks.gated_attention_block.gemm_problem import GemmProblem
from benchmarks.gated_attention_block.pointwise_problem import GateProblem, NormRopeProblem
from benchmarks.gated_attention_block.sampled import MAX_ROWS, near, sample_rows
from benchmarks.gated_attention_block.sdpa_problem import SdpaProblem, attended_rows
from benchmarks.harness import measure
from benchmarks.harness.arm import Arm, Missing, Role
from benchmarks.harness.case import Lab, select
from benchmarks.harness.goals import Goal, verdicts
from benchmarks.harness.results import Row
from benchmarks.harness.rows import CONTROL
from benchmarks.harness.sets import MIN_LARGE_SETS
from benchmarks.harness.timing import CapturedArm, EagerCalls, GraphTimer
from cudnn_blocks import GatedAttentionGeometry
from cudnn_blocks.reference.attention import AttentionMask, sdpa

torch.set_num_threads(1)  # sizes are small: threads would only wait for one another

LAB = Lab(rounds=1, l2_bytes=60 << 20, ceiling_gb_s=None, timer=None, check_only=True)
GEOMETRY = GatedAttentionGeometry(64, h_q=4, h_kv=2, d_head=64, rope_dim=16)
TOKENS = 70
BLOCK = BlockProblem("small", GEOMETRY, TOKENS)
SDPA = SdpaProblem(4, 2, 64, True, TOKENS)
GEMM = GemmProblem(GEOMETRY.n_qkvg, 64, TOKENS, GEOMETRY)
CASES = [
    GemmCase(GEMM, "cpu"),
    GemmCase(GemmProblem(64, 256, TOKENS), "cpu"),
    SdpaCase(SDPA, "cpu"),
    SdpaCase(SdpaProblem(4, 2, 64, False, TOKENS), "cpu"),
    NormRopeCase(NormRopeProblem("small", GEOMETRY, TOKENS), "cpu"),
    GateCase(GateProblem("small", GEOMETRY, TOKENS), "cpu"),
    BlockCase(BLOCK, "cpu"),
]


def ids(value):
    return f"{value.kinds[0]}/{value.label}"


def row_names() -> list[str]:
    """The case of every row of ours that a run has."""
    names = []
    for case in BENCH.cases:
        variants = getattr(case, "variants", None) or getattr(case, "VARIANTS", ("",))
        modes = case.modes if len(case.modes) > 1 else ("",)
        names += [
            "/".join(filter(None, (case.kinds[0], case.name, mode, variant, case.shape)))
            for mode in modes
            for variant in variants
        ]
    return names


def test_the_grid():
    labels = {ids(case) for case in BENCH.cases}
    assert len(labels) == len(BENCH.cases)
    counts = {"gemm": 20, "sdpa": 15, "pointwise": 8, "block": 8, "host": 1}
    for family, count in counts.items():
        assert len(select(BENCH.cases, f"{family}/*", None)) == count
    products = {case.name for case in BENCH.cases if isinstance(case, GemmCase)}
    assert products == {"9216x2048", "2048x4096", "17408x4096", "4096x8192"}
    assert {case.shape for case in BENCH.cases if isinstance(case, BlockCase)} == {
        *("S2048", "S4096", "S8192", "S32768"),
        "S16",
    }


def test_every_goal_has_rows():
    names = row_names()
    for goal in BENCH.goals:
        assert fnmatch.filter(names, goal.case), goal


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gemm/17408x4096/M2048", [("ratio", 1.0, True)]),
        ("gemm/9216x2048/norm-rope/M32768", [("overhead", 0.04, False)]),
        ("sdpa/d256-causal/S2048", [("ratio", 1.0, True)]),
        ("sdpa/d256-causal/S4096", [("ratio", 1.1, False), ("ratio", 1.0, True)]),
        ("sdpa/d256-full/S32768", [("ratio", 1.05, False)]),
        ("sdpa/d128-causal/S2048", [("ratio", 1.05, False)]),
        ("sdpa/d128-causal/gate/S2048", [("overhead", 0.05, False)]),
        ("block/qwen3-next/eager/S2048", [("ratio", 2.2, False), ("overhead", 0.0, True)]),
        ("block/qwen3-next/eager/S32768", [("ratio", 1.1, False), ("overhead", 0.0, True)]),
        ("block/qwen3-next/graph/S4096", [("ratio", 1.15, False), ("overhead", 0.0, True)]),
        ("block/qwen3-next/graph/S8192", [("overhead", 0.0, True)]),
        ("block/qwen3.5-397b/eager/S2048", [("overhead", 0.0, True)]),
        ("block/qwen3-next/eager/unfused/S2048", []),
        ("pointwise/gate/qwen3-next/S2048", []),
        ("pointwise/norm-rope/qwen3.5-397b/S8192", [("share", 0.8, False)]),
        ("host/qwen3-next/S16", [("launches", 5.0, False)]),
        ("host/qwen3-next/unfused/S16", []),
    ],
)
def test_goals_of_a_row(name, wanted):
    assert name in row_names()
    found = [goal for goal in BENCH.goals if fnmatch.fnmatchcase(name, goal.case)]
    assert [(one.measure, one.bound, one.forgives_spread) for one in found] == wanted


@pytest.mark.parametrize(
    ("goal", "got", "met"),
    [
        (Goal("gemm/*", 0.04, "overhead"), 0.05, False),
        (Goal("gemm/*", 0.05, "overhead"), 0.05, True),
        (Goal("gemm/*", 0.04, "overhead", forgives_spread=True), 0.05, True),
        (Goal("gemm/*", 5.0, "launches"), 4.5, True),
        (Goal("gemm/*", 4.0, "launches"), 4.5, False),
    ],
)
def test_bounds_from_above(goal, got, met):
    row = Row(
        case="gemm/x",
        arm="ours",
        engine="hopper",
        mode="graph",
        overhead=0.05,
        ratio_to_trivial_launch=4.5,
        control_spread=0.02,
    )
    (verdict,) = verdicts([goal], [row], is_whole=True)
    assert (verdict.got, verdict.met, verdict.at_least) == (got, met, None)
    assert verdict.at_most == goal.bound + 0.02 * goal.forgives_spread
    (lost,) = verdicts([goal], [], is_whole=True)
    assert (lost.at_most, lost.at_least, lost.met) == (goal.bound, None, False)


def test_operations_and_bytes_of_known_rows():
    by_label = {f"{case.kinds[0]}/{case.label}": case for case in BENCH.cases}
    # floors at 790 TFLOP/s and 4.3 TB/s as tabled for the models, in microseconds
    floors = {2048: 185, 4096: 457, 8192: 1261, 32768: 13396}
    for tokens, floor_us in floors.items():
        block = by_label[f"block/qwen3-next/S{tokens}"]
        assert block.flops / 790e6 == pytest.approx(floor_us, rel=5e-3)
    causal = by_label["sdpa/d256-causal/S8192"]
    assert causal.flops == 4 * 16 * 256 * (8192 * 8193 // 2)
    assert by_label["sdpa/d256-full/S8192"].flops == 4 * 16 * 256 * 8192**2
    assert by_label["gemm/9216x2048/M4096"].flops == 2 * 4096 * 9216 * 2048
    gate = by_label["pointwise/gate/qwen3-next/S8192"]
    assert gate.traffic_bytes == 3 * 2 * 8192 * 4096
    norm = by_label["pointwise/norm-rope/qwen3-next/S8192"]
    assert norm.traffic_bytes == 2 * (2 * 8192 * 18 * 256 + 2 * 256 + 2 * 8192 * 64)
    assert norm.flops is None


def test_one_set_only_where_it_is_several_times_the_l2_and_operations_bound_it():
    for case in BENCH.cases:
        if case.min_sets == 1:
            assert case.footprint_bytes >= 4 * (60 << 20)
            assert case.flops is not None
        else:
            assert case.min_sets == MIN_LARGE_SETS


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_check_only_is_right_on_the_reference_engine(case):
    outcome = case.measure(LAB)
    assert [row.note for row in outcome.rows if row.status == "failed"] == []
    rows = {(row.case, row.arm): row for row in outcome.rows}
    ours_rows = [row for (_, arm), row in rows.items() if arm == "ours"]
    assert {row.engine for row in ours_rows} == {"reference"}
    assert all(row.median_us is None for row in outcome.rows)
    assert case._truth is None
    passed = {row.arm for row in outcome.rows if row.status == "ok"}
    wanted = {
        "gemm": {peers.CUBLAS},
        "sdpa": {attention_peers.TORCH},
        "pointwise": {peers.EAGER},
        "block": {"chain-torch"},
    }
    assert wanted[case.kinds[0]] <= passed


def test_absent_peers_are_listed_with_a_reason():
    rows = [row for row in SdpaCase(SDPA, "cpu").measure(LAB).rows if row.status == "missing"]
    found = {row.arm: row.note for row in rows}
    assert found.keys() == set(attention_peers.BUILDERS)
    assert all(found.values())
    rows = [row for row in BlockCase(BLOCK, "cpu").measure(LAB).rows if row.status == "missing"]
    assert {row.arm for row in rows} == {f"chain-{name}" for name in attention_peers.BUILDERS}


@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.parametrize("damage", ["nan", "one element", "one row", "small"])
def test_a_wrong_result_is_named(case, damage):
    problem = case.problem
    rows = torch.arange(problem.tokens)

    def bind(buffers):
        found = problem.expected(buffers, rows, "")
        name, result = next(iter(found.items()))
        if damage == "nan":
            result[0, 1].flatten()[3] = math.nan
        elif damage == "one element":
            result[0, 0].flatten()[3] += 1.0
        elif damage == "one row":
            result[0, 0] = 0
        else:
            result *= 0.9
        return lambda: found | {name: result}

    assert case.check(Arm("x", Role.OURS, "torch", bind)) is not None
    case._truth = None


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_reference_itself_and_short_results(case):
    problem, rows = case.problem, torch.arange(case.problem.tokens)

    def whole(buffers):
        return lambda: problem.expected(buffers, rows, "")

    def short(buffers):
        found = problem.expected(buffers, rows, "")
        return lambda: {name: result[:, :-1] for name, result in found.items()}

    assert case.check(Arm("x", Role.OURS, "torch", whole)) is None
    assert "for 70 tokens" in case.check(Arm("x", Role.OURS, "torch", short))
    assert case.check(Arm("x", Role.OURS, "torch", lambda _: dict)).endswith("missing")
    case._truth = None


def test_an_arm_that_writes_nothing_is_found_out():
    for case in CASES:
        if isinstance(case, NormRopeCase):
            continue  # its inputs are its outputs
        wrong = case.check(Arm("x", Role.OURS, "torch", lambda _: lambda: None))
        assert "not finite" in wrong
        case._truth = None


def test_norm_in_place_is_checked_on_a_new_slab_each_time():
    case = NormRopeCase(NormRopeProblem("small", GEOMETRY, TOKENS), "cpu")
    offers = case.offers(case.make_sets(1), None)
    assert [case.check(offers[0]) for _ in range(2)] == [None, None]
    assert case.check(Arm("x", Role.OURS, "torch", lambda _: lambda: None)) is not None


def test_sampled_rows_of_attention_are_those_of_the_whole():
    buffers = SDPA.make_set("cpu")
    q, k, v = (buffers[name] for name in "qkv")
    whole, mask = torch.empty_like(q), AttentionMask(is_causal=True)
    sdpa(q, k, v, whole, None, None, None, SDPA.geometry.scale, mask)
    rows = torch.tensor([0, 5, TOKENS - 1])
    found = attended_rows(q[:, rows], k, v, rows, SDPA.geometry)
    torch.testing.assert_close(found, whole[:, rows], rtol=0.01, atol=1e-3)


def test_rows_are_sampled_from_end_to_end():
    for tokens in (1, 2, 3, 64, 65, 4096):
        rows = sample_rows(tokens, "cpu").tolist()
        assert rows == sorted(set(rows))
        assert {rows[0], rows[-1]} == {0, tokens - 1}
        assert len(rows) == min(tokens, MAX_ROWS)


def test_near_is_relative_to_the_row():
    wanted = torch.randn(3, 256) * torch.tensor([[1.0], [1e-3], [10.0]])
    assert near(wanted * 1.005, wanted, 0.01) is None
    for factor in (1.02, math.nan, 0.0):
        actual = wanted.clone()
        actual[1] *= factor
        assert near(actual, wanted, 0.01).startswith("1 of 3 sampled rows off")
    assert near(wanted[:, :8], wanted, 0.01).startswith("shape")


class SteadyTimer(GraphTimer):
    """Slower by the arm: the first one bound takes ten microseconds, the next eleven ..."""

    def __init__(self):
        self.seen = {}
        self.replays = {}

    def measure_us(self, arm, replays):
        us = self.seen.setdefault(id(arm), 10.0 + len(self.seen))
        self.replays.setdefault(id(arm), []).append(replays)
        return us

    def lead_in(self, arm, replays):
        assert replays > 0
        assert id(arm) in self.seen


@pytest.fixture
def lab(monkeypatch):
    def launch_all(launches):
        return CapturedArm([launch() for launch in launches], tuple(launches))

    monkeypatch.setattr(measure, "capture", launch_all)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Lab(
        2,
        l2_bytes=1 << 10,
        ceiling_gb_s=1e3,
        timer=SteadyTimer(),
        peak_tflop_s=1e-3,
        is_sustained=True,
    )


def test_block_rows_are_eager_and_graph_with_the_unfused_form_as_base(lab):
    rows = {(row.case, row.arm): row for row in BlockCase(BLOCK, "cpu").measure(lab).rows}
    for mode in ("eager", "graph"):
        fused = rows[f"block/small/{mode}/S70", "ours"]
        unfused = rows[f"block/small/{mode}/unfused/S70", "ours"]
        chain = rows[f"block/small/{mode}/S70", "chain-torch"]
        assert fused.mode == unfused.mode == chain.mode == mode
        assert fused.ratio_to_best_peer == round(chain.median_us / fused.median_us, 4) > 1
        assert fused.overhead == round(fused.median_us / unfused.median_us - 1, 4) < 0
        assert (unfused.ratio_to_best_peer, unfused.overhead) == (None, None)
        assert (f"block/small/{mode}/S70", "chain-torch" + CONTROL) in rows


def test_attention_arms_have_bursts_of_one_length(lab):
    rows = {(row.case, row.arm): row for row in SdpaCase(SDPA, "cpu").measure(lab).rows}
    lengths = {replays for seen in lab.timer.replays.values() for replays in seen[2:]}
    assert len(lengths) == 1
    assert rows["sdpa/d64-causal/gate/S70", "ours"].overhead == pytest.approx(0.1)
    assert rows["sdpa/d64-causal/S70", "ours"].ratio_to_best_peer == pytest.approx(1.2)


def test_gemm_epilogue_is_an_overhead_over_the_plain_product(lab):
    rows = {(row.case, row.arm): row for row in GemmCase(GEMM, "cpu").measure(lab).rows}
    name = f"{GEMM.n}x64"
    assert rows[f"gemm/{name}/M70", "ours"].ratio_to_best_peer is not None
    assert rows[f"gemm/{name}/norm-rope/M70", "ours"].overhead == pytest.approx(1 / 11, abs=1e-4)
    assert rows[f"gemm/{name}/norm-rope/M70", "ours"].ratio_to_best_peer is None


def test_an_eager_arm_that_raises_fails_in_that_mode_alone(lab, monkeypatch):
    def refuse(launches):
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(measure, "capture", refuse)
    rows = {(row.case, row.arm): row for row in BlockCase(BLOCK, "cpu").measure(lab).rows}
    assert rows["block/small/eager/S70", "ours"].status == "ok"
    assert rows["block/small/graph/S70", "ours"].note.startswith("capture: RuntimeError")


def test_eager_calls_run_in_order():
    called = []
    calls = EagerCalls(tuple(lambda i=i: called.append(i) for i in range(3)))
    calls.replay()
    assert called == [0, 1, 2]


def test_host_rows_relate_to_the_trivial_launch(lab, monkeypatch):
    def trivial():
        return Arm("trivial-tvm-ffi", Role.YARDSTICK, "x", lambda _: lambda: None)

    monkeypatch.setattr("benchmarks.gated_attention_block.bench.trivial_arm", trivial)
    monkeypatch.setattr("benchmarks.gated_attention_block.bench.HOST_CALLS", 2)
    monkeypatch.setattr(measure, "MAX_CALLS_BETWEEN_SYNCS", 20)
    case = HostCase(BlockProblem("small", GEOMETRY, 2), "cpu")
    rows = {(row.case, row.arm): row for row in case.measure(lab).rows}
    assert rows["host/small/S2", "ours"].ratio_to_trivial_launch > 1
    assert rows["host/small/unfused/S2", "ours"].mode == "eager"


def flash_module(name, monkeypatch, returns_tuple):
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        geometry = SDPA.geometry
        assert (softmax_scale, causal) == (geometry.scale, True)
        o = attention_peers.torch_default(q, k, v, geometry).attend(q, k, v)
        return (o, None) if returns_tuple else o

    module = ModuleType(name)
    module.flash_attn_func = flash_attn_func
    for parent in ("flash_attn", name):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("peer", "name", "returns_tuple"),
    [("fa4", "flash_attn.cute", True), ("fa3", "fa3_fwd_interface", False)],
)
def test_flash_attention_packages_are_called_as_they_want(monkeypatch, peer, name, returns_tuple):
    flash_module(name, monkeypatch, returns_tuple)
    rows = {row.arm: row for row in SdpaCase(SDPA, "cpu").measure(LAB).rows}
    assert rows[peer].status == "ok"
    rows = {row.arm: row for row in BlockCase(BLOCK, "cpu").measure(LAB).rows}
    assert rows[f"chain-{peer}"].status == "ok"


def test_torch_ops_take_these_arguments():
    for op in ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention"):
        names = {one.name for one in getattr(torch.ops.aten, op).default._schema.arguments}
        assert {"is_causal", "scale"} <= names
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema.arguments
    assert {"attn_bias", "compute_log_sumexp"} <= {one.name for one in cudnn}


def test_a_gpu_compiles_both_functions_before_it_calls_one(monkeypatch):
    order = []

    def compiled(function, *, is_tuned=False):
        order.append(f"compile {function.__name__}")

        def run(*operands):
            order.append(f"call {function.__name__}")
            return function(*operands)

        return run

    monkeypatch.setattr(peers, "compiled", compiled)
    monkeypatch.setattr(
        peers, "builders_of", lambda device: {"torch": attention_peers.torch_default}
    )
    buffers = BLOCK.make_set("cpu")
    (arm,) = peers.chain_peers(BLOCK, buffers, "cuda")
    arm.bind(buffers)()
    assert order[:2] == ["compile norm_rope", "compile gate"]
    assert order[2:] == ["call norm_rope", "call norm_rope", "call gate"]


def test_other_engines_stand_beside_the_default_one(monkeypatch):
    built = []

    def arm_of(op, name="ours", role=Role.OURS, variant=""):
        built.append((op, name, role))
        if op == "cudnn":
            raise RuntimeError("no frontend")
        return Arm(name, role, op or "hopper", lambda _: lambda: None, variant)

    monkeypatch.setattr(ours, "arm_of", arm_of)
    found = ours.engine_arms(lambda engine: engine, "", "cuda", ("portable", "cudnn"))
    assert [(one.name, getattr(one, "role", None)) for one in found] == [
        ("ours", Role.OURS),
        ("ours-portable", Role.ENGINE),
        ("ours-cudnn", None),
    ]
    assert found[2] == Missing("ours-cudnn", "RuntimeError: no frontend")
    found = ours.engine_arms(lambda engine: engine, "", "cpu", ("portable", "cudnn"))
    assert [one.name for one in found] == ["ours"]


def test_cases_name_the_packages_of_their_peers():
    assert {"flash-attn-4", "fa3-fwd", "nvidia-cudnn-frontend"} <= set(BENCH.peer_distributions)
    assert cases.GEOMETRIES["qwen3.5-397b"].n_qkvg == 17408
