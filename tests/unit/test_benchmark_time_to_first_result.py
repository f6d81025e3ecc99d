# SPDX-License-Identifier: Apache-2.0
"""time_to_first_result: fresh processes, the same bits, and rows that say what was imported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.harness.goals import verdicts
from benchmarks.time_to_first_result import BENCH, bench
from benchmarks.time_to_first_result.bench import ARMS, COLD, DISK, FirstResultCase, spec_of
from benchmarks.time_to_first_result.cases import BUNDLE
from cudnn_blocks.deploy import REQUESTS, DeployFile
from tests.unit.test_deploy_file import SMALLEST

TINY = {
    "op": "conv3d-rmsnorm-silu-pad",
    "frames": 3,
    "height": 6,
    "width": 6,
    "in_channels": 8,
    "out_channels": 8,
}


def run(took_us: float, *, sha256: str = "a", imports_dsl: bool = False) -> dict[str, Any]:
    return {
        "took_us": took_us,
        "imports_dsl": imports_dsl,
        "engines": ["conv3d: hopper"],
        "sha256": sha256,
    }


def rows_of(runs):
    return {arm: bench._row("first/x/y", arm, runs) for arm in ARMS}


def test_every_arm_is_a_fresh_process_on_the_reference_too(tmp_path):
    runs = FirstResultCase("tiny", "3x6x6", TINY).run_all(1, tmp_path, "cpu")
    assert [len(runs[arm]) for arm in ARMS] == [1, 1, 1]
    every = [one for arm in ARMS for one in runs[arm]]
    assert len({one["sha256"] for one in every}) == 1
    assert all(one["took_us"] > 0 and not one["imports_dsl"] for one in every)
    assert every[0]["engines"] == ["conv3d: reference"]


def test_ratios_are_to_the_cold_process():
    rows = rows_of(
        {
            COLD: [run(9e6, imports_dsl=True), run(8e6, imports_dsl=True), run(7e6)],
            DISK: [run(4e6, imports_dsl=True)],
            BUNDLE: [run(1e6), run(2e6), run(3e6)],
        }
    )
    assert [row.ratio_to_best_peer for row in rows.values()] == [None, 2.0, 4.0]
    assert rows[BUNDLE].note == "2000 ms, 0.250 of cold, cutlass not imported"
    assert rows[COLD].note == "8000 ms, 1.000 of cold, cutlass imported"
    (verdict,) = verdicts(BENCH.goals, list(rows.values()), is_whole=True)
    assert verdict.met


@pytest.mark.parametrize(
    ("broken", "note"),
    [
        (run(1e6, sha256="b"), "other bits than the cold process"),
        (run(1e6, imports_dsl=True), "cutlass was imported"),
    ],
)
def test_a_wrong_bundle_has_no_time(broken, note):
    row = rows_of({COLD: [run(8e6)], DISK: [run(4e6)], BUNDLE: [run(1e6), broken]})[BUNDLE]
    assert (row.status, row.note, row.median_us, row.ratio_to_best_peer) == (
        "failed",
        note,
        None,
        None,
    )


def test_a_process_that_fails_is_told():
    with pytest.raises(RuntimeError, match=r"(?s)child failed: .*JSONDecodeError"):
        bench._run(("benchmarks.time_to_first_result.child", "{"), {})


@pytest.mark.parametrize("request_class", REQUESTS, ids=lambda one: one.op_name())
def test_arguments_travel_as_json(request_class):
    op = request_class.op_name()
    text = json.dumps({"plans": [{"op": op, **SMALLEST[op]}]})
    (request,) = DeployFile.model_validate_json(text).plans
    spec = json.loads(json.dumps(spec_of(request)))
    assert spec["op"] == request_class.op_class.__name__
    assert sum(shape is not None for shape in spec["tensors"].values()) >= 2


def test_a_bundle_may_come_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv(bench.PREBUILT_VARIABLE, str(tmp_path))
    assert (
        BENCH.cases[0].bundle(tmp_path / "x", "sm_90a") == tmp_path / f"{BENCH.cases[0].name}.cbb"
    )
