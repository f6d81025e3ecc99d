# SPDX-License-Identifier: Apache-2.0
"""The convolution benchmark: its table, its arithmetic, and its arms on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.conv3d import BENCH, cases, chain, ours, peers
from benchmarks.conv3d.bench import BareCase, CausalCase, FusedCase, HintCase
from benchmarks.conv3d.causal_problem import CausalProblem
from benchmarks.conv3d.problem import Conv3dProblem
from benchmarks.harness import inductor, measure
from benchmarks.harness.arm import Arm, Missing, Role
from benchmarks.harness.case import Lab, select
from benchmarks.harness.sets import MIN_LARGE_SETS
from benchmarks.harness.timing import CapturedArm, GraphTimer

torch.set_num_threads(1)  # frames are small: threads would only wait for one another

LAB = Lab(rounds=1, l2_bytes=60 << 20, ceiling_gb_s=None, timer=None, check_only=True)
FUSED = {"is_fused": True, "has_residual": True}
SIZES = (5, 7, 3)  # rows, columns, frames
BARE = Conv3dProblem("16-24/later", 16, 24, *SIZES)
FIRST = Conv3dProblem("16-24/first", 16, 24, 5, 7, 1, **FUSED)
LATER = Conv3dProblem("16-24/later", 16, 24, *SIZES, history_frames=2, **FUSED)
SHORT = Conv3dProblem("16-24/later", 16, 24, 5, 7, 1, history_frames=2, **FUSED)
WIDE = Conv3dProblem("8-328/later", 8, 328, 3, 3, 2, history_frames=2, **FUSED)
HINTED = Conv3dProblem("16-24/first", 16, 24, 5, 7, 1, is_fused=True, zero_leading_frames=2)
CAUSAL_FIRST = CausalProblem("12-160/first", 5, 6, 1)
CAUSAL_LATER = CausalProblem("12-160/later", 5, 6, 2, history_frames=2)
CASES = [
    BareCase(BARE, "cpu"),
    *(FusedCase(problem, "cpu") for problem in (FIRST, LATER, SHORT, WIDE)),
    HintCase(HINTED, "cpu"),
    CausalCase(CAUSAL_FIRST, "cpu"),
    CausalCase(CAUSAL_LATER, "cpu"),
]

TABLE = {
    "160-160": ("T1-352x640", "T4-352x640"),
    "160-320": ("T1-176x320", "T4-176x320"),
    "320-320": ("T1-176x320", "T4-176x320"),
    "320-640": ("T1-88x160", "T2-88x160"),
    "640-640": ("T1-88x160", "T2-88x160", "T1-44x80"),
    "640-96": ("T1-44x80",),
}
"""Every 3x3x3 layer of the encoder behind the first, and its output frames and sizes."""


def ids(value):
    return f"{type(value).__name__} {value.label}"


def shapes_of(family: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for case in BENCH.cases:
        if case.kinds[0] == family:
            found.setdefault(case.name.split("/")[0], set()).add(case.shape)
    return found


def test_every_layer_of_the_encoder_is_there():
    table = {channels: set(shapes) for channels, shapes in TABLE.items()}
    assert shapes_of("bare") == table
    assert shapes_of("fused") == {name: table[name] for name in table if name != "640-96"}
    assert shapes_of("causal") == {"12-160": {"T1-352x640", "T4-352x640"}}
    assert shapes_of("hint") == {"160-160": {"T1-352x640"}}
    labels = [(case.kinds, case.label) for case in BENCH.cases]
    assert len(labels) == len(set(labels))


def test_prefixes_select():
    for family, count in (("bare", 12), ("fused", 15), ("hint", 2), ("causal", 2)):
        assert len(select(BENCH.cases, f"{family}/*", None)) == count
    assert len(select(BENCH.cases, "fused/160-160/later", "T4-*")) == 1


def test_every_goal_has_rows_and_every_row_a_goal_but_wide_fused_ones():
    import fnmatch

    names = [f"{case.kinds[0]}/{case.label}" for case in BENCH.cases]
    for goal in BENCH.goals:
        assert fnmatch.filter(names, goal.case), goal
    without = [
        name for name in names if not any(fnmatch.fnmatch(name, goal.case) for goal in BENCH.goals)
    ]
    assert {name.split("/")[1] for name in without} == {"320-640", "640-640"}
    assert all(name.startswith("fused/") for name in without)


def test_slow_engine_runs_once_per_pair_of_channels():
    for problems in (cases.BARE, cases.FUSED):
        pairs = [(p.in_channels, p.out_channels) for p in problems if p.has_every_engine]
        assert len(pairs) == len(set(pairs))
        assert set(pairs) == {(p.in_channels, p.out_channels) for p in problems}
        assert all(p.frames == 1 for p in problems if p.has_every_engine)


def test_operations_and_bytes_of_a_known_row():
    bare = next(p for p in cases.BARE if p.name == "160-160/later")
    assert bare.flops == pytest.approx(1246e9, rel=1e-3)
    assert bare.input_shape == (1, 6, 354, 642, 160)
    pixels = 6 * 354 * 642 + 4 * 352 * 640
    assert bare.traffic_bytes == 2 * (160 * pixels + 27 * 160 * 160)
    first = next(p for p in cases.BARE if p.name == "160-160/first")
    assert replace(first, zero_leading_frames=2).flops * 3 == first.flops
    causal = {p.frames: p for p in cases.CAUSAL}
    assert causal[4].flops == pytest.approx(93.4e9, rel=1e-3)
    assert causal[1].flops == pytest.approx(23.4e9 / 3, rel=1e-2)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_traffic_is_what_the_operands_hold(case):
    problem = case.problem
    buffers = problem.make_set("cpu")
    scratch = {"packed_weight", "padded_input"}
    if not getattr(problem, "is_one_op", True):
        scratch.add("output")
    held = sum(tensor.numel() for name, tensor in buffers.items() if name not in scratch)
    assert problem.traffic_bytes == 2 * held
    assert all(buffers[name].isnan().all() for name in problem.results)
    assert not any(
        tensor.isnan().any()
        for name, tensor in buffers.items()
        if name not in {*problem.results, *scratch}
    )


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_reference_fills_every_result_and_torch_agrees(case):
    buffers = case.problem.make_set("cpu")
    expected, unfused = (case.problem.expected(buffers), case.problem.unfused(buffers))
    assert expected.keys() == unfused.keys() == set(case.problem.results)
    for name, wanted in expected.items():
        torch.testing.assert_close(unfused[name], wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_check_only_is_right_on_the_reference_engine(case):
    outcome = case.measure(LAB)
    assert [row.note for row in outcome.rows if row.status == "failed"] == []
    assert not outcome.ours_failed
    rows = {row.arm: row for row in outcome.rows}
    assert "reference" in rows["ours"].engine
    assert all(row.median_us is None for row in outcome.rows)
    if isinstance(case, FusedCase):
        assert rows[peers.COMPILED].status == "missing"
        assert {peers.CONV, peers.EAGER} <= rows.keys()
        assert ("ours-op-alone" in rows) is (case.problem in (LATER, SHORT))
    if isinstance(case, CausalCase):
        assert {f"{peers.CONV}-c12", f"{peers.CONV}-c16", peers.EAGER} <= rows.keys()
    if isinstance(case, HintCase):
        assert rows.keys() == {"ours", HintCase.UNHINTED}


def test_history_in_its_places_is_part_of_our_arm():
    buffers = LATER.make_set("cpu")
    ours.conv3d_arm(LATER, buffers, ours.Engine("reference")).bind(buffers)()
    assert torch.equal(buffers["padded_output"][:, :2, 1:-1, 1:-1], buffers["history"])
    buffers = SHORT.make_set("cpu")
    ours.conv3d_arm(SHORT, buffers, ours.Engine("reference")).bind(buffers)()
    assert torch.equal(buffers["cache_output"][:, 0], buffers["history"][:, 1])
    alone = LATER.make_set("cpu")
    arm = ours.conv3d_arm(LATER, alone, ours.Engine("reference"), copies_history=False)
    arm.bind(alone)()
    assert alone["padded_output"][:, :2, 1:-1, 1:-1].isnan().all()


def test_layers_too_wide_to_fuse_are_two_plans():
    buffers = WIDE.make_set("cpu")
    assert len(ours.conv3d_plans(WIDE, buffers, "reference")) == 2
    assert ours.conv3d_arm(WIDE, buffers, ours.Engine("reference")).engine == (
        "reference + reference"
    )
    assert len(ours.conv3d_plans(LATER, LATER.make_set("cpu"), "reference")) == 1


def test_hint_reaches_the_plan_of_our_arm_only():
    buffers = HINTED.make_set("cpu")
    assert not buffers["input"][:, :2].any()
    hinted = ours.conv3d_plans(HINTED, buffers, "reference", hinted=True)[0].describe()
    plain = ours.conv3d_plans(HINTED, buffers, "reference")[0].describe()
    assert "zero_leading_frames=2" in hinted
    assert "zero_leading_frames=0" in plain


def test_a_hopper_gpu_gets_both_engines_and_others_the_portable_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    both = ours.engines_of("cuda", every=True)
    assert [(one.name, one.arm, one.role) for one in both] == [
        ("hopper", "ours", Role.OURS),
        ("portable", "ours-portable", Role.ENGINE),
    ]
    assert [one.name for one in ours.engines_of("cuda", every=False)] == ["hopper"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    only = ours.engines_of("cuda", every=True)
    assert [(one.name, one.role) for one in only] == [("portable", Role.OURS)]


def test_packed_input_of_the_peer_is_the_layer_without_its_packing():
    buffers = CAUSAL_LATER.make_set("cpu")
    wanted = CAUSAL_LATER.expected(buffers)["output"]
    for channels in (12, 16):
        x, weight = CAUSAL_LATER.padded(buffers, channels)
        assert x.shape[-1] == weight.shape[1] == channels
        assert weight.is_contiguous(memory_format=torch.channels_last_3d)
        torch.testing.assert_close(chain.convolve(x, weight), wanted, rtol=0.02, atol=0.02)


def test_peers_take_channels_last():
    buffers = BARE.make_set("cpu")
    x = buffers["input"].permute(0, 4, 1, 2, 3)
    assert x.is_contiguous(memory_format=torch.channels_last_3d)
    assert buffers["weight"].is_contiguous(memory_format=torch.channels_last_3d)


def broken(results, name, index, value):
    results[name][index] = value
    return results


@pytest.mark.parametrize("name", ["padded_output", "cache_output", "residual_output"])
@pytest.mark.parametrize("value", [math.nan, 7.0])
def test_a_wrong_result_is_named(name, value):
    case = FusedCase(LATER, "cpu")
    for role in (Role.OURS, Role.PEER):

        def bind(buffers):
            return lambda: broken(LATER.expected(buffers), name, (0, 0, 0, 0, 0), value)

        wrong = case.check(Arm("x", role, "torch", bind))
        assert wrong.startswith(f"{name}: 1 of")


def test_ours_may_lack_nothing_and_a_peer_something_but_not_everything():
    case = CausalCase(CAUSAL_LATER, "cpu")

    def arm(role, *names):
        def bind(buffers):
            found = CAUSAL_LATER.expected(buffers)
            return lambda: {name: found[name] for name in names}

        return Arm("x", role, "torch", bind)

    assert case.check(arm(Role.PEER, "output")) is None
    assert case.check(arm(Role.OURS, "output")) == "cache_output is missing"
    assert case.check(arm(Role.PEER)) == "it has none of output, cache_output"


def test_a_peer_that_cannot_be_built_is_listed(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("no cuDNN here")

    monkeypatch.setattr(peers, "cudnn_arm", refuse)
    found = peers.conv_alone(BARE.make_set("cpu"), "cuda")
    assert found == Missing(peers.CONV, "RuntimeError: no cuDNN here")


class SteadyTimer(GraphTimer):
    """Ten microseconds for every measurement."""

    def __init__(self):
        self.counts = set()

    def measure_us(self, arm, replays):
        self.counts.add(arm.count)
        return 10.0


def test_timed_rows_carry_their_family_and_a_ratio(monkeypatch):
    def launch_all(launches):
        return CapturedArm([launch() for launch in launches], tuple(launches))

    monkeypatch.setattr(measure, "capture", launch_all)
    lab = Lab(2, l2_bytes=1 << 10, ceiling_gb_s=1e3, timer=SteadyTimer(), peak_tflop_s=1e-3)
    rows = {row.arm: row for row in FusedCase(LATER, "cpu").measure(lab).rows}
    assert rows["ours"].case == "fused/16-24/later/T3-5x7"
    assert rows["ours"].ratio_to_best_peer == 1.0
    assert rows["ours"].unit == "TFLOP/s"
    assert rows[peers.EAGER].ratio_to_best_peer is None
    assert rows[peers.CONV].control_spread == rows[peers.EAGER].control_spread == 0.0
    assert rows[peers.CONV].median_us == rows["ours-op-alone"].median_us == 10.0
    assert lab.timer.counts == {MIN_LARGE_SETS}


def test_an_arm_found_at_fault_is_never_timed(monkeypatch):
    def at_fault(sample, device, role=Role.PEER):
        return Arm(peers.CONV, role, "vol2col", lambda _: 1 / 0, fault="not cuDNN: vol2col")

    monkeypatch.setattr(peers, "conv_alone", at_fault)
    rows = {row.arm: row for row in FusedCase(FIRST, "cpu").measure(LAB).rows}
    assert (rows[peers.CONV].status, rows[peers.CONV].note) == ("failed", "not cuDNN: vol2col")
    rows = {row.arm: row for row in BareCase(BARE, "cpu").measure(LAB).rows}
    assert rows["ours"].status == "ok"
    assert rows[peers.CONV].status == "failed"


def test_peers_of_a_fused_layer_on_a_gpu(monkeypatch):
    tunings = []

    def compiled(layer, *, is_tuned):
        tunings.append(is_tuned)
        return layer

    def proved(name, bind, sample, what, role=Role.PEER):
        return Arm(name, role, what, bind)

    monkeypatch.setattr(peers, "compiled", compiled)
    monkeypatch.setattr(peers, "cudnn_arm", proved)
    for is_tuned in (False, True):
        problem = replace(LATER, is_tuned=is_tuned)
        buffers = problem.make_set("cpu")
        found = peers.fused_peers(problem, buffers, "cuda")
        assert [(arm.name, arm.role) for arm in found] == [
            (peers.COMPILED, Role.PEER),
            (peers.EAGER, Role.PEER),
            (peers.CONV, Role.YARDSTICK),
        ]
        assert ("tuned" in found[0].engine) is is_tuned
        assert found[0].bind(buffers)().keys() == set(problem.results)
    assert tunings == [False, True]


def test_compiled_peers_are_static_whole_graphs(monkeypatch):
    calls = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: calls.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda function, **options: calls.append(options))
    for is_tuned in (False, True):
        inductor.compiled(chain.fused_layer, is_tuned=is_tuned)
    plain = {"fullgraph": True, "dynamic": False, "options": None}
    tuned = plain | {"options": {"max_autotune_pointwise": True}}
    assert calls == ["reset", plain, "reset", tuned]


def test_truth_is_dropped_after_the_case():
    case = BareCase(BARE, "cpu")
    case.measure(LAB)
    assert case._truth is None
