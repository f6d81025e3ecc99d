# SPDX-License-Identifier: Apache-2.0
"""Every example runs, says what it shows, and can fail."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PARAGRAPHS = [
    b"One.",
    b"x",
    "Größe, naïveté, 数, and an emoji 🙂: every byte is a token.".encode(),
    b"A longer paragraph keeps its row while the others come and go; it ends last of all, alone.",
    b"two\nlines",
    b"zz",
    b"A slot that was freed is taken again here.",
    b"And here.",
    b"And once more, for a request that outlives the queue.",
]
TEXT = b"\n\n".join(PARAGRAPHS) + b"\n"
SMALL = ["--channels", "16", "--layers", "2", "--batch", "3"]
ON_CPU = [*SMALL, "--device", "cpu"]


def load(name: str):
    """An example as a fresh module; its name starts with a digit."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def loop():
    return load("02_decode_loop")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(autouse=True)
def keep_num_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def hook_steps(monkeypatch, loop, at_step, act):
    """Runs ``act(stack)`` between two steps of the batched runs, whatever drives the steps."""
    set_feed, steps = loop.DecodeStack.set_feed, []

    def hooked(stack, tokens, slots):
        set_feed(stack, tokens, slots)
        if stack.rows > 1:
            steps.append(stack)
            if len(steps) == at_step:
                act(stack)

    monkeypatch.setattr(loop.DecodeStack, "set_feed", hooked)


def corrupt_state(stack):
    """A newest token of the last layer, in the slot of row 0."""
    stack.states[-1, int(stack.slots[0]), 0, -1] = 1000.0


def test_every_example_is_numbered_and_has_main():
    paths = sorted(EXAMPLES.glob("*.py"))
    assert [path.name for path in paths] == [
        "01_probe.py",
        "02_decode_loop.py",
        "03_video_vae_stream.py",
        "04_gated_attention.py",
        "05_build_and_serve.py",
        "06_wan_vae_encode.py",
        "07_qwen3_next_attention.py",
        "08_fla_short_convolution.py",
    ]
    for path in paths:
        assert re.match(r"\d\d_[a-z0-9_]+\.py$", path.name)
        assert callable(load(path.stem).main)


def test_probe_says_what_is_served_and_what_is_not(capsys):
    assert load("01_probe").main([]) == 0
    printed = capsys.readouterr().out
    for target in ("sm_80", "sm_90a", "sm_100a", "sm_120a", "cpu"):
        assert re.search(rf"│ {target} +│ yes ", printed)
    assert "missing: portable: width=5 (served: 2, 3, 4)" in printed
    assert "width 4: workspace of 0 bytes" in printed
    report = json.loads(printed.split("as JSON:")[1])
    assert report["served"] is False
    assert report["target"] == "sm_90a"
    assert report["decline_type"] == "NotServedError"


def test_probe_takes_targets(capsys):
    assert load("01_probe").main(["--channels", "5", "--target", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "reference" in printed
    assert "│ sm_90a " not in printed


def test_probe_exit_status_is_1_where_a_target_declines(monkeypatch):
    probe = load("01_probe")
    served = probe.probe_targets(64, 4, ["cpu"])
    declined = probe.probe_targets(64, 5, ["cpu"])
    monkeypatch.setattr(probe, "probe_targets", lambda *_: [*served, *declined])
    assert probe.main(["--target", "cpu"]) == 1


def test_examples_run_as_scripts(monkeypatch, capsys, text):
    for name, argv in (("01_probe", []), ("02_decode_loop", [str(text), *ON_CPU])):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *argv])
        with pytest.raises(SystemExit) as exit_:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        assert exit_.value.code == 0
    assert "PASSED" in capsys.readouterr().out


def test_decode_loop_equals_running_alone(loop, text, capsys):
    assert loop.main(["--file", str(text), *ON_CPU]) == 0
    printed = capsys.readouterr().out
    tokens = sum(map(len, PARAGRAPHS))
    assert "`reference` engine" in printed
    assert f"text.txt: 9 of 9 paragraphs, {tokens} tokens" in printed
    assert re.search(r"^eager +9 of 9 requests bitwise equal to running alone; \d", printed, re.M)
    assert "tokens/s" in printed
    assert printed.rstrip().splitlines()[-1].startswith("PASSED")


@pytest.mark.parametrize(
    "options",
    [
        ["--batch", "1"],
        ["--batch", "16"],  # more rows than requests: some rows are padding from the start
        ["--channels", "1"],
        ["--channels", "100", "--layers", "5"],
        ["--seed", "7"],
    ],
    ids=" ".join,
)
def test_decode_loop_at_other_sizes(loop, text, capsys, options):
    assert loop.main(["--file", str(text), *ON_CPU, "--check-only", *options]) == 0
    printed = capsys.readouterr().out
    assert "9 of 9 requests bitwise equal to running alone\nPASSED" in printed
    assert "tokens/s" not in printed


def test_decode_loop_serves_the_first_requests(loop, text, capsys):
    assert loop.main(["--file", str(text), *ON_CPU, "--max-requests", "2"]) == 0
    assert "text.txt: 2 of 9 paragraphs, 5 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("max_tokens", "served"), [(1, 1), (4, 1), (5, 2), (len(TEXT), len(PARAGRAPHS))]
)
def test_default_budget_takes_whole_paragraphs(loop, text, monkeypatch, max_tokens, served):
    monkeypatch.setitem(loop.DEFAULTS["cpu"], "max_tokens", max_tokens)
    options = loop.parse(["--file", str(text), "--device", "cpu"])
    assert options.requests == PARAGRAPHS[:served]
    assert options.found == len(PARAGRAPHS)


def test_default_file_is_the_readme(loop):
    options = loop.parse(["--device", "cpu"])
    assert options.file == EXAMPLES.parent / "README.md"
    assert b"".join(options.requests).decode()


def test_requests_hold_slots_of_their_own_and_reuse_freed_ones(loop, text, monkeypatch):
    admit, set_feed = loop.DecodeStack.admit, loop.DecodeStack.set_feed
    taken, fed = [], []

    def spy_admit(stack, row, slot):
        taken.extend([(row, slot)] if stack.rows > 1 else [])
        admit(stack, row, slot)

    def spy_feed(stack, tokens, slots):
        fed.extend([slots] if stack.rows > 1 else [])
        set_feed(stack, tokens, slots)

    monkeypatch.setattr(loop.DecodeStack, "admit", spy_admit)
    monkeypatch.setattr(loop.DecodeStack, "set_feed", spy_feed)
    assert loop.main(["--file", str(text), *ON_CPU]) == 0
    slots = [slot for _, slot in taken]
    assert len(taken) == len(PARAGRAPHS)
    assert len(set(slots)) < len(slots)
    assert any(row != slot for row, slot in taken)
    assert any(-1 in step for step in fed)
    for step in fed:
        live = [slot for slot in step if slot >= 0]
        assert len(set(live)) == len(live)


def test_decode_loop_fails_when_a_state_is_corrupted(loop, text, monkeypatch, capsys):
    hook_steps(monkeypatch, loop, 3, corrupt_state)
    assert loop.main(["--file", str(text), *ON_CPU]) == 1
    printed = capsys.readouterr().out
    assert "8 of 9 requests bitwise equal" in printed
    assert re.search(r"^  request 0: .*digest differs", printed, re.M)
    assert "FAILED" in printed
    assert "PASSED" not in printed


def test_decode_loop_fails_on_one_flipped_bit_of_a_final_state(loop, text, monkeypatch, capsys):
    def flip(stack):
        stack.states[-1, int(stack.slots[0]), 0].view(torch.int16)[-1] ^= 1

    hook_steps(monkeypatch, loop, len(PARAGRAPHS[0]), flip)  # before the last token of request 0
    assert loop.main(["--file", str(text), *ON_CPU]) == 1
    assert "request 0: states differs" in capsys.readouterr().out


def test_decode_loop_fails_when_a_slot_is_not_zeroed(loop, text, monkeypatch, capsys):
    monkeypatch.setattr(loop.DecodeStack, "admit", lambda stack, row, _: stack.digest[row].zero_())
    assert loop.main(["--file", str(text), *ON_CPU]) == 1
    printed = capsys.readouterr().out
    assert "out is not finite" in printed
    assert "FAILED" in printed


def test_decode_loop_fails_when_slots_are_routed_wrong(loop, text, monkeypatch, capsys):
    def swap(stack):
        stack.slots[:2] = stack.slots[:2].flip(0)

    hook_steps(monkeypatch, loop, 1, swap)
    assert loop.main(["--file", str(text), *ON_CPU]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("slot", "kind"), [(None, "duplicate"), (99, "out of range"), (-2, "below -1")]
)
def test_decode_loop_reports_a_bad_slot(loop, text, monkeypatch, capsys, slot, kind):
    def route(stack):
        stack.slots[0] = stack.slots[1] if slot is None else slot

    hook_steps(monkeypatch, loop, 1, route)
    assert loop.main(["--file", str(text), *ON_CPU]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: conv_state_indices" in printed
    assert f"({kind})" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--file", "no/such/file"], "No such file"),
        (["--batch", "0"], "--batch: expected at least 1"),
        (["--max-requests", "0"], "--max-requests: expected at least 1"),
    ],
)
def test_decode_loop_refuses_bad_arguments(loop, capsys, argv, message):
    with pytest.raises(SystemExit) as exit_:
        loop.main(["--device", "cpu", *argv])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_decode_loop_refuses_an_empty_file(loop, tmp_path, capsys):
    (tmp_path / "empty.txt").write_bytes(b"\n \n\n")
    with pytest.raises(SystemExit):
        loop.main(["--device", "cpu", "--file", str(tmp_path / "empty.txt")])
    assert "no paragraph to serve" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("channels", ["256", "100"])
def test_decode_loop_on_a_gpu(loop, text, capsys, channels):
    argv = ["--file", str(text), "--device", "cuda", "--layers", "4", "--batch", "3"]
    assert loop.main([*argv, "--channels", channels]) == 0
    printed = capsys.readouterr().out
    assert "portable" in printed
    for mode in ("eager", "CUDA graph"):
        assert re.search(rf"^{mode} +9 of 9 requests bitwise equal to running alone", printed, re.M)
    assert "PASSED" in printed


@pytest.mark.gpu
def test_decode_loop_on_a_gpu_fails_when_a_state_is_corrupted(loop, text, monkeypatch, capsys):
    set_feed = loop.DecodeStack.set_feed

    def corrupt_often(stack, tokens, slots):
        set_feed(stack, tokens, slots)
        if stack.rows > 1 and slots[0] >= 0:
            corrupt_state(stack)

    monkeypatch.setattr(loop.DecodeStack, "set_feed", corrupt_often)
    assert loop.main(["--file", str(text), "--device", "cuda", *SMALL]) == 1
    printed = capsys.readouterr().out
    for mode in ("eager", "CUDA graph"):
        assert re.search(rf"^{mode} +[0-8] of 9 requests bitwise equal", printed, re.M)
    assert "FAILED" in printed
