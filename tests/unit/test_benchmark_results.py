# SPDX-License-Identifier: Apache-2.0
"""Result files, tables and the environment record."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from rich.console import Console

from benchmarks.harness import environment, report
from benchmarks.harness.results import CompileCount, Document, Row, gpu_slug, write

ROW = Row(
    case="kernel/L4/N8-D2048",
    arm="ours",
    engine="portable",
    mode="graph",
    median_us=2.0,
    min_us=1.9,
    max_us=2.2,
    floor_us=1.0,
    achieved=2000.0,
    ceiling=4000.0,
    control_spread=0.01,
    ratio_to_best_peer=1.5,
)
LOST = ROW.model_copy(update={"case": "kernel/L4/N1-D2048", "ratio_to_best_peer": 0.9})
NOISE = ROW.model_copy(update={"case": "kernel/L4/N2-D2048", "ratio_to_best_peer": 0.995})
FAILED = Row(
    case="kernel/L4/N4-D2048",
    arm="ours",
    engine="portable",
    mode="graph",
    status="failed",
    note="conv_state: 1 of 8 elements differ in bits",
)
GONE = Row(
    case="kernel/L3/N4-D2048",
    arm="fla",
    engine=None,
    mode="graph",
    status="missing",
    note="n/a: cache is [N, D, W] [/x]",
)


def document(**fields) -> Document:
    plain = {
        "gpu": "NVIDIA H200",
        "driver": "580.1",
        "torch": "2.11",
        "dsl": "4.8.1",
        "peers": {"triton": "3.6.0"},
        "missing_peers": {"flash-linear-attention": "not installed"},
        "commit": "abc-dirty",
        "sm_clock_mhz": (1980, None),
        "rows": [ROW, LOST, NOISE, FAILED, GONE],
        "compile_counts": [
            CompileCount(case="compiles/x", batch_sizes=200, calls_one_batch_size=1, calls_sweep=1)
        ],
    }
    return Document(**(plain | fields))


def test_document_round_trips_through_its_file(tmp_path):
    path = write(document(), "causal_conv1d_update", tmp_path)
    assert path == tmp_path / "nvidia-h200" / "causal_conv1d_update.json"
    assert Document.model_validate_json(path.read_text()) == document()
    keys = {
        "case", "arm", "engine", "mode", "median_us", "min_us", "max_us", "floor_us", "achieved",
        "ceiling", "control_spread", "ratio_to_best_peer",
    }  # fmt: skip
    assert keys <= set(json.loads(path.read_text())["rows"][0])


def test_a_partial_run_never_replaces_the_whole_one(tmp_path):
    whole = write(document(), "bench", tmp_path)
    partial = write(document(selection={"case": "L4"}), "bench", tmp_path)
    assert partial.name == "bench.partial.json"
    assert Document.model_validate_json(whole.read_text()).selection == {}


def test_rows_refuse_what_is_no_number():
    with pytest.raises(ValidationError):
        Row(case="x", arm="ours", engine="e", mode="graph", median_us=float("nan"))
    with pytest.raises(ValidationError):
        Row(case="x", arm="ours", engine="e", mode="warp")


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "nvidia-h200"), ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb")],
)
def test_gpu_slug(name, slug):
    assert gpu_slug(name) == slug


def test_only_losses_beyond_the_control_spread_count():
    assert report.slower_than_best_peer([ROW, LOST, NOISE, FAILED, GONE]) == [LOST]


def test_table_and_summary_say_what_failed_and_what_is_missing():
    console = Console(width=report.PIPE_COLUMNS, record=True, quiet=False, file=open_null())
    console.print(report.table(document().rows, "title"))
    text = console.export_text()
    assert "FAILED" in text
    assert "MISSING" in text
    assert "n/a: cache is [N, D, W] [/x]" in text
    assert "50%" in text
    lines = "\n".join(report.summary(document()))
    assert "3 rows with a ratio; 1 below 1" in lines
    assert "FAILED kernel/L4/N4-D2048 ours: conv_state" in lines
    assert "MISSING peer flash-linear-attention: not installed" in lines
    assert "compiles/x: 1 for one batch size, 1 for 200" in lines


def open_null():
    import io

    return io.StringIO()


def test_compile_count_verdict():
    count = document().compile_counts[0]
    assert count.passes
    assert not count.model_copy(update={"calls_sweep": 2}).passes


def test_commit_is_head_or_the_variable(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "0123abc")
    assert environment.commit() == "0123abc"
    monkeypatch.delenv(environment.COMMIT_VARIABLE)
    assert environment.commit() == "unknown"


@pytest.mark.parametrize(("status", "suffix"), [("", ""), (" M file", "-dirty")])
def test_commit_says_dirty(monkeypatch, tmp_path, status, suffix):
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    answers = {"rev-parse": "0123abc", "status": status}
    monkeypatch.setattr(environment, "_output", lambda _, verb, *rest: answers[verb])
    assert environment.commit() == f"0123abc{suffix}"


def test_absent_peers_are_named():
    found, missing = environment.peer_versions(["pytest", "no-such-distribution"])
    assert found == {"pytest": pytest.__version__}
    assert missing == {"no-such-distribution": "not installed"}
