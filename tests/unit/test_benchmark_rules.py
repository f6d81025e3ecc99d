# SPDX-License-Identifier: Apache-2.0
"""The benchmark's arithmetic and rules on rows, without a device."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.arm import Arm, Missing, Role, offer, own
from benchmarks.harness.compiles import counted
from benchmarks.harness.host import MAX_CALLS_BETWEEN_SYNCS, host_us, interleaved_host_us
from benchmarks.harness.rows import CONTROL, Measured, best_peers, build_rows
from benchmarks.harness.sets import L2_MULTIPLE, LATENCY_SETS, MAX_SETS, MIN_SETS, plan_sets
from benchmarks.harness.statistics import (
    control_spread,
    ratio_to_best_peer,
    shuffles,
    summarise,
)
from benchmarks.harness.timing import MAX_REPLAYS, TARGET_US, replays_for


def arm(name: str, role: Role, variant: str = "") -> Arm:
    return Arm(name, role, f"engine of {name}", lambda buffers: lambda: buffers, variant)


OURS, FAST, SLOW = arm("ours", Role.OURS), arm("fast", Role.PEER), arm("slow", Role.PEER)
ROUNDS = {"ours": [5.0, 4.0, 6.0], "fast": [8.0], "slow": [20.0], "fast" + CONTROL: [8.4]}


def rows_of(offers=(OURS, FAST, SLOW), failures=None, rounds=None, **fields):
    measured = Measured(
        kind="kernel",
        name="L4",
        shape="N8-D2048",
        mode="graph",
        offers=offers,
        failures=failures or {},
        rounds_us=ROUNDS if rounds is None else rounds,
        **fields,
    )
    return build_rows(measured)


def test_summary_is_median_and_extremes():
    sample = summarise([3.0, 1.0, 2.0])
    assert (sample.median_us, sample.min_us, sample.max_us) == (2.0, 1.0, 3.0)
    with pytest.raises(ValueError, match="at least one round"):
        summarise([])


def test_control_spread_is_symmetric():
    assert control_spread(10.0, 11.0) == pytest.approx(0.1)
    assert control_spread(11.0, 10.0) == control_spread(10.0, 11.0)


def test_ratio_is_best_peer_over_ours():
    assert ratio_to_best_peer(4.0, [12.0, 8.0]) == 2.0
    assert ratio_to_best_peer(4.0, []) is None


@given(st.lists(st.text(min_size=1), min_size=1, max_size=6, unique=True), st.integers(1, 12))
def test_every_arm_runs_once_a_round(keys, rounds):
    orders = list(shuffles(keys, rounds))
    assert len(orders) == rounds
    assert all(sorted(order) == sorted(keys) for order in orders)
    assert orders == list(shuffles(keys, rounds))


def test_an_arm_follows_every_other_one():
    keys = list("abcde")
    orders = list(shuffles(keys, 20))
    followed = {(a, b) for order in orders for a, b in itertools.pairwise(order)}
    assert followed == set(itertools.permutations(keys, 2))


@given(st.integers(1, 1 << 34), st.integers(1 << 20, 1 << 28))
def test_cold_rows_outgrow_the_l2_and_the_rest_are_latency_rows(footprint_bytes, l2_bytes):
    plan = plan_sets(footprint_bytes, l2_bytes)
    assert plan.count >= MIN_SETS
    if plan.is_cold:
        assert plan.kind == "kernel"
        assert plan.count * footprint_bytes >= L2_MULTIPLE * l2_bytes
        assert plan.count <= MAX_SETS
        fewer = plan.count - 1
        assert plan.count == MIN_SETS or fewer * footprint_bytes < L2_MULTIPLE * l2_bytes
    else:
        assert (plan.kind, plan.count) == ("latency", LATENCY_SETS)
        assert MAX_SETS * footprint_bytes < L2_MULTIPLE * l2_bytes


def test_set_plan_refuses_sizes_that_are_not_sizes():
    with pytest.raises(ValueError, match="positive byte counts"):
        plan_sets(0, 1)


@given(st.floats(0.1, 1e7))
def test_replays_reach_the_target_within_the_cap(graph_us):
    replays = replays_for(graph_us)
    assert 1 <= replays <= MAX_REPLAYS
    assert replays == MAX_REPLAYS or replays * graph_us >= TARGET_US * 0.999


def test_rows_carry_the_ratio_on_our_arm_only():
    rows = {row.arm: row for row in rows_of()}
    assert list(rows) == ["ours", "fast", "fast" + CONTROL, "slow"]
    assert rows["ours"].ratio_to_best_peer == pytest.approx(8.0 / 5.0)
    assert [row.arm for row in rows.values() if row.ratio_to_best_peer is not None] == ["ours"]
    assert {row.control_spread for row in rows.values()} == {0.05}
    assert rows["ours"].case == "kernel/L4/N8-D2048"
    assert (rows["ours"].min_us, rows["ours"].max_us) == (4.0, 6.0)


def test_roofline_columns():
    ours = rows_of(traffic_bytes=20_000_000, ceiling_gb_s=4000.0)[0]
    assert ours.floor_us == pytest.approx(5.0)
    assert ours.achieved == pytest.approx(4000.0)
    assert ours.ceiling == 4000.0
    assert rows_of()[0].floor_us is None


def test_a_wrong_arm_of_ours_has_no_ratio_and_no_time():
    rounds = {key: times for key, times in ROUNDS.items() if key != "ours"}
    ours, *others = rows_of(failures={"ours": "output: 3 of 8 off"}, rounds=rounds)
    assert (ours.status, ours.note) == ("failed", "output: 3 of 8 off")
    assert ours.ratio_to_best_peer is None
    assert ours.median_us is None
    assert all(row.ratio_to_best_peer is None for row in others)


def test_a_wrong_peer_is_no_peer():
    rounds = {"ours": [5.0], "slow": [20.0], "slow" + CONTROL: [20.0]}
    rows = {row.arm: row for row in rows_of(failures={"fast": "state differs"}, rounds=rounds)}
    assert rows["fast"].status == "failed"
    assert rows["ours"].ratio_to_best_peer == pytest.approx(4.0)


def test_a_missing_peer_is_listed_with_its_reason():
    offers = (OURS, Missing("fla", "ModuleNotFoundError: no fla"))
    ours, fla = rows_of(offers=offers, rounds={"ours": [5.0]})
    assert (fla.status, fla.engine, fla.note) == ("missing", None, "ModuleNotFoundError: no fla")
    assert ours.ratio_to_best_peer is None
    assert ours.control_spread is None


def test_ratios_and_overheads_stay_within_their_variants():
    offers = [
        arm(name, role, variant)
        for variant in ("none", "trap")
        for name, role in (("ours", Role.OURS), ("peer", Role.PEER))
    ]
    rounds = {"none/ours": [10.0], "none/peer": [12.0], "trap/ours": [10.5], "trap/peer": [21.0]}
    rows = {
        row.case.split("/")[2] + row.arm: row
        for row in rows_of(offers=offers, rounds=rounds, base_variant="none")
    }
    assert rows["noneours"].ratio_to_best_peer == pytest.approx(1.2)
    assert rows["trapours"].ratio_to_best_peer == pytest.approx(2.0)
    assert rows["trapours"].overhead == pytest.approx(0.05)
    assert rows["noneours"].overhead is None
    best = best_peers(offers, {key: times[0] for key, times in rounds.items()})
    assert {variant: one.name for variant, one in best.items()} == {"none": "peer", "trap": "peer"}


def test_host_rows_relate_to_the_trivial_launch():
    trivial = arm("trivial", Role.YARDSTICK)
    rows = rows_of(
        offers=(trivial, OURS), rounds={"trivial": [4.0], "ours": [6.0]}, trivial="trivial"
    )
    assert [row.ratio_to_trivial_launch for row in rows] == [1.0, 1.5]
    assert [row.ratio_to_best_peer for row in rows] == [None, None]


def test_host_clock_counts_calls_and_refuses_long_batches():
    calls, syncs = [], []
    assert host_us(lambda: calls.append(1), lambda: syncs.append(1), 10) >= 0
    assert (len(calls), len(syncs)) == (10, 2)
    with pytest.raises(ValueError, match="between syncs"):
        host_us(lambda: None, lambda: None, MAX_CALLS_BETWEEN_SYNCS + 1)


def test_host_rounds_are_interleaved():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = interleaved_host_us(calls, lambda: None, rounds=2, calls_per_round=1)
    assert {key: len(rounds) for key, rounds in times.items()} == {"a": 2, "b": 2}
    assert order == ["a", "b", "a", "b", "b", "a"]


def test_building_an_arm_never_raises():
    def broken() -> Arm:
        raise NotImplementedError("not on this device\nsecond line")

    missing = offer("peer", broken)
    assert missing == Missing("peer", "NotImplementedError: not on this device")
    ours = own("ours", broken)
    assert ours.role is Role.OURS
    with pytest.raises(NotImplementedError, match="not on this device"):
        ours.bind(None)


def test_compiles_are_counted_with_options_in_brackets_too():
    class Compiler:
        options = ()

        def __call__(self, function):
            return function

        def __getitem__(self, options):
            return self

    class Namespace:
        compile = Compiler()

    original = Namespace.compile

    def work():
        Namespace.compile("f")
        Namespace.compile["fast"]("g")
        assert Namespace.compile.options == ()

    assert counted(work, Namespace) == 2
    assert Namespace.compile is original
