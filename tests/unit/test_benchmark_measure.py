# SPDX-License-Identifier: Apache-2.0
"""Cases measured from end to end with the device's parts replaced: graphs, events, peers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks.causal_conv1d_update import peers
from benchmarks.causal_conv1d_update.bench import HostCase, IndexedCase, UpdateCase
from benchmarks.causal_conv1d_update.problem import Problem
from benchmarks.harness import measure, timing
from benchmarks.harness.arm import Arm, Role
from benchmarks.harness.case import Lab
from benchmarks.harness.rows import CONTROL
from benchmarks.harness.sets import MIN_SETS
from benchmarks.harness.timing import CapturedArm, GraphTimer, replays_for

PLAIN = Problem("L4", 2, 16, state_len=4)
INDEXED = Problem("indices", 4, 16, state_len=4, indexed=True)


class FakeTimer(GraphTimer):
    """Counts measurements instead of timing them; ten microseconds each."""

    def __init__(self) -> None:
        self.measured: list[tuple[CapturedArm, int]] = []

    def measure_us(self, arm, replays):
        self.measured.append((arm, replays))
        return getattr(arm.graph, "us", 10.0)


def launch_all(launches):
    outputs = [launch() for launch in launches]
    return CapturedArm(graph=outputs, launches=tuple(launches))


@pytest.fixture
def lab(monkeypatch):
    monkeypatch.setattr(measure, "capture", launch_all)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Lab(rounds=3, l2_bytes=1 << 10, ceiling_gb_s=1000.0, timer=FakeTimer())


@pytest.fixture
def fake_fla(monkeypatch):
    """A module shaped like FLA 0.6.0's; its second configuration is the fast one."""
    configs = [SimpleNamespace(kwargs={"BD": bd}, num_warps=4) for bd in (8, 64)]
    tuner = SimpleNamespace(configs=configs)

    def update(x, cache, residual=None, weight=None, bias=None, activation=None):
        assert activation == "silu"
        return peers.unfused_update(x, cache, weight), cache

    module = ModuleType("fla.modules.causal_conv1d.ops")
    module.causal_conv1d_update = update
    module.causal_conv1d_update_kernel = SimpleNamespace(fn=tuner)
    for name in ("fla", "fla.modules", "fla.modules.causal_conv1d"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(
        peers,
        "capture",
        lambda launches: CapturedArm(
            SimpleNamespace(us=float(100 - tuner.configs[0].kwargs["BD"])), tuple(launches)
        ),
    )
    peers._fla_kernel.cache_clear()
    yield tuner
    peers._fla_kernel.cache_clear()


def test_graph_rows_have_times_floor_control_and_ratio(lab):
    rows = {row.arm: row for row in UpdateCase(PLAIN, "cpu").measure(lab).rows}
    assert rows["ours"].case == "kernel/L4/N2-D16"
    assert rows["ours"].ratio_to_best_peer == 1.0
    assert rows["torch-eager" + CONTROL].control_spread == 0.0
    assert rows["ours"].floor_us == pytest.approx(PLAIN.traffic_bytes / 1e6, abs=1e-4)
    assert rows["cudnn-frontend"].status == "missing"
    assert {graph.count for graph, _ in lab.timer.measured} == {MIN_SETS}


def test_an_arm_that_cannot_be_captured_fails_alone(lab, monkeypatch):
    def capture(launches):
        if getattr(launches[0], "func", None) is peers.unfused_update:
            raise RuntimeError("operation not permitted when stream is capturing")
        return launch_all(launches)

    monkeypatch.setattr(measure, "capture", capture)
    rows = {row.arm: row for row in UpdateCase(PLAIN, "cpu").measure(lab).rows}
    assert rows["torch-eager"].note.startswith("capture: RuntimeError: operation not permitted")
    assert rows["ours"].median_us == 10.0
    assert rows["ours"].ratio_to_best_peer is None


def test_small_problems_become_latency_rows(lab):
    small = Lab(rounds=1, l2_bytes=1 << 30, ceiling_gb_s=1000.0, timer=lab.timer)
    rows = UpdateCase(PLAIN, "cpu").measure(small).rows
    assert {row.case for row in rows} == {"latency/L4/N2-D16"}


def test_fla_is_tuned_per_case_and_pinned(lab, fake_fla):
    rows = {row.arm: row for row in UpdateCase(PLAIN, "cpu").measure(lab).rows}
    assert rows["fla"].status == "ok"
    assert rows["fla"].engine == "triton {'BD': 64}, 4 warps"
    assert [config.kwargs for config in fake_fla.configs] == [{"BD": 64}]


def test_indexed_rows_show_the_cost_of_the_checks(lab):
    rows = [row for row in IndexedCase(INDEXED, "cpu").measure(lab).rows if row.arm == "ours"]
    assert [row.case.split("/")[2] for row in rows] == ["none", "trap", "report"]
    assert [row.overhead for row in rows] == [None, 0.0, 0.0]
    assert [row.ratio_to_best_peer for row in rows] == [1.0, 1.0, None]
    assert {row.status for row in rows} == {"ok"}


def test_host_rows_are_eager_and_name_missing_peers(lab):
    rows = {row.arm: row for row in HostCase(PLAIN, "cpu").measure(lab).rows}
    assert all(row.case.startswith("host/L4/") and row.mode == "eager" for row in rows.values())
    assert rows["ours-op"].status == "ok"
    assert rows["ours-execute"].median_us > 0
    assert rows["torch-mul-out"].ratio_to_best_peer is None
    assert rows["fla"].status == "missing"


def test_descriptions_come_along(lab):
    outcome = UpdateCase(PLAIN, "cpu").measure(lab)
    assert any("causal-conv1d-update" in text for text in outcome.descriptions)


def test_a_sustained_arm_leads_in_with_its_own_launches(monkeypatch):
    monkeypatch.setattr(timing, "LEAD_US", 1000.0)
    log = []

    def arm(name, us, count):
        graph = SimpleNamespace(us=us, replay=lambda: log.append(name))
        return CapturedArm(graph, (None,) * count)

    class Timer(FakeTimer):
        def measure_us(self, arm, replays):
            log.append((arm.graph.us, replays))
            return arm.graph.us

    arms = [
        Arm(name, role, "", lambda buffers: lambda: None)
        for name, role in (("ours", Role.OURS), ("slow", Role.PEER))
    ]
    captured = {"ours": arm("ours", 50.0, 4), "slow": arm("slow", 2000.0, 4)}
    keyed = {one.key: captured[one.name] for one in arms}
    measure.rounds_of(arms, keyed, Timer(), rounds=1, has_equal_bursts=True, is_sustained=True)
    timed = log[4:]  # after two pilots of each
    for name, us, leads in (("ours", 50.0, 5), ("slow", 2000.0, 1)):
        first = timed.index((us, replays_for(50.0 * 4)))
        assert timed[first - leads : first] == [name] * leads
    log.clear()
    measure.rounds_of(arms, keyed, Timer(), rounds=1, has_equal_bursts=True)
    assert not {"ours", "slow"} & {entry for entry in log if isinstance(entry, str)}
