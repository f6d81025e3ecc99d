# SPDX-License-Identifier: Apache-2.0
"""The benchmark's command line on a machine with no GPU."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from benchmarks import run
from benchmarks.causal_conv1d_update import BENCH
from benchmarks.harness.case import Lab, Outcome, select
from benchmarks.harness.goals import Goal
from benchmarks.harness.results import Document, Row


def invoke(*args):
    return CliRunner().invoke(run.main, list(args))


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_list_needs_no_gpu(no_gpu):
    result = invoke("--list")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) == sum(len(run.load(n).cases) for n in run.BENCHES)
    assert "causal_conv1d_update  kernel|latency/L4/N1024-D8192" in result.output


def test_run_without_gpu_says_so(no_gpu):
    result = invoke()
    assert result.exit_code == 2
    assert "CudaUnavailableError" in result.output
    assert "--list" in result.output


def test_filters_that_match_nothing_are_an_error():
    result = invoke("--list", "--case", "L7")
    assert result.exit_code == 2
    assert "no case matches" in result.output


@pytest.mark.parametrize(
    ("case", "shape", "labels"),
    [
        ("host/*", "N1-D2048", {"update/N1-D2048"}),
        (
            "L4",
            "N8-D4096",
            {
                "L4/N8-D4096",
            },
        ),
        ("L3-*", "N8-D4096", {"L3-compact/N8-D4096", "L3-channel-last/N8-D4096"}),
        ("kernel/L3-compact", "N8-D4096", {"L3-compact/N8-D4096"}),
        ("indices", None, {"indices/N1024-D8192", "indices/N1024-D2048"}),
        ("compiles", None, {"update/N1..200"}),
    ],
)
def test_filter(case, shape, labels):
    assert {one.label for one in select(BENCH.cases, case, shape)} == labels


def test_grid_is_the_whole_grid():
    whole = {
        f"{layout}/N{n}-D{d}"
        for layout in ("L4", "L3-compact", "L3-channel-last")
        for n in (1, 8, 32, 64, 128, 256, 512, 1024)
        for d in (2048, 4096, 8192, 12288)
    }
    labels = [one.label for one in BENCH.cases]
    assert whole <= set(labels)
    assert len(labels) == len({(one.kinds, one.label) for one in BENCH.cases})


class _FakeCase:
    kinds = ("kernel",)
    name = "L4"
    shape = "N1-D1"
    label = "L4/N1-D1"

    def __init__(self, status: str) -> None:
        self._row = Row(
            case="kernel/L4/N1-D1", arm="ours", engine="portable", mode="graph", status=status
        )

    def measure(self, lab: Lab) -> Outcome:
        return Outcome(rows=[self._row])

    def plans(self) -> list[object]:
        return []


@pytest.fixture
def fake_gpu(monkeypatch):
    monkeypatch.setattr(run.environment, "sm_clock_mhz", lambda: None)
    monkeypatch.setattr(run.environment, "driver", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")


@pytest.fixture
def fake_lab(monkeypatch, fake_gpu):
    lab = Lab(rounds=1, l2_bytes=1 << 20, ceiling_gb_s=None, timer=None)
    monkeypatch.setattr(run, "open_lab", lambda rounds, **_: lab)


@pytest.mark.parametrize(
    ("filters", "verdict"), [((), "NOT MET"), (("--case", "L4"), None), (("--case", "L*"), None)]
)
def test_goals_are_judged_printed_and_written(monkeypatch, tmp_path, fake_lab, filters, verdict):
    bench = run.Bench("conv3d", (_FakeCase("ok"),), (), (Goal("fused/*", 1.5),))
    monkeypatch.setattr(run, "load", lambda name: bench)
    result = invoke("conv3d", "--out", str(tmp_path), *filters)
    assert result.exit_code == 0, result.output
    assert ("NOT MET fused/*: ratio missing, at least 1.5" in result.output) is bool(verdict)
    (path,) = (tmp_path / "nvidia-h200").iterdir()
    assert len(Document.model_validate_json(path.read_text()).verdicts) == bool(verdict)


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("failed", 1)])
def test_exit_status_tells_whether_our_arms_are_right(
    monkeypatch, tmp_path, fake_lab, status, code
):
    bench = run.Bench("causal_conv1d_update", (_FakeCase(status),), ())
    monkeypatch.setattr(run, "load", lambda name: bench)
    result = invoke("causal_conv1d_update", "--out", str(tmp_path))
    assert result.exit_code == code, result.output
    assert (tmp_path / "nvidia-h200" / "causal_conv1d_update.json").exists()


def test_a_sustained_run_has_a_file_of_its_own(monkeypatch, tmp_path, fake_gpu):
    asked = []

    def open_lab(rounds, *, check_only, is_sustained):
        asked.append(is_sustained)
        return Lab(rounds, 1 << 20, ceiling_gb_s=None, timer=None, is_sustained=is_sustained)

    monkeypatch.setattr(run, "open_lab", open_lab)
    monkeypatch.setattr(run, "load", lambda name: run.Bench("conv3d", (_FakeCase("ok"),), ()))
    for flags in ((), ("--sustained",), ("--sustained", "--case", "L4")):
        assert invoke("conv3d", "--out", str(tmp_path), *flags).exit_code == 0
    assert asked == [False, True, True]
    written = {path.name: path for path in (tmp_path / "nvidia-h200").iterdir()}
    assert set(written) == {
        "conv3d.json",
        "conv3d.sustained.json",
        "conv3d.sustained.partial.json",
    }
    for name, path in written.items():
        document = Document.model_validate_json(path.read_text())
        assert document.is_sustained is ("sustained" in name)
