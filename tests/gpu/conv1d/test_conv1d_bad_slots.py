# SPDX-License-Identifier: Apache-2.0
"""Bad slots: ``report`` records and skips them, ``trap`` ends the context (S03)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cudnn_blocks import BadSlotError, check_status
from tests.helpers.conv1d_problem import STATE_FORMS, assert_matches, expect, make_problem
from tests.helpers.tensors import assert_same_bits

pytestmark = pytest.mark.gpu

FAULTS = {
    "pair": [3, 1, 3, 0],
    "pair-side-by-side": [3, 3, 0, 1],
    "three-of-a-kind": [2, 0, 2, 1, 2],
    "two-pairs": [0, 1, 1, 0, 2],
    "out-of-range": [0, 12, 1],
    "far-out-of-range": [0, 2**31 - 1, 1],
    "below-padding": [0, -2, 1],
    "far-below": [-(2**31), 0],
    "out-of-range-twice": [12, 12, 0],
    "below-twice": [-5, -5, 0],
    "padding-twice-is-fine": [-1, 0, -1, 2],
    "all-bad": [4, 4, 99, -3],
    "mixed": [4, -1, 99, 4, -3, 5],
}


@pytest.mark.parametrize("channels", [5, 520, 8192, 12288])
@pytest.mark.parametrize("indices", FAULTS.values(), ids=FAULTS)
def test_report(indices, channels):
    problem = make_problem(
        *(len(indices), channels),
        device="cuda",
        has_bias=True,
        activation="silu",
        indices=indices,
        num_slots=12,
        on_bad_index="report",
    )
    problem.status.fill_(77)
    expected = expect(problem)
    done = problem.run()
    assert_matches(done, expected)
    good = (expected.status == 77).all(1)
    assert good.tolist() == [
        slot == -1 or (0 <= slot < 12 and indices.count(slot) == 1) for slot in indices
    ]
    assert not done.out[~good].any()


@pytest.mark.parametrize(("width", "state_len", "layout"), STATE_FORMS)
def test_report_in_every_state_form(width, state_len, layout):
    problem = make_problem(
        *(6, 521, width, state_len, layout),
        device="cuda",
        indices=FAULTS["mixed"],
        num_slots=12,
        on_bad_index="report",
    )
    expected = expect(problem)
    assert_matches(problem.run(), expected)


@pytest.mark.parametrize("distance", [1, 2, 5, 31, 32, 33, 127, 128, 129, 500, 1023])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_duplicates_at_any_distance(distance, first):
    """Rows of one CTA, of neighbours, and of CTAs far apart."""
    num_rows = 1030
    problem = make_problem(num_rows, 2048, device="cuda", indices="shuffled", on_bad_index="report")
    second = min(first + distance, num_rows - 1)
    problem.indices[second] = problem.indices[first]
    expected = expect(problem)
    done = problem.run()
    assert_matches(done, expected)
    slot = int(problem.indices[first])
    with pytest.raises(BadSlotError) as raised:
        check_status(done.status)
    assert raised.value.faults == [(first, slot, "duplicate"), (second, slot, "duplicate")]


def test_clean_rows_are_what_they_are_without_the_bad_ones():
    problem = make_problem(
        64, 2048, device="cuda", indices="shuffled", on_bad_index="report", activation="silu"
    )
    clean = problem.clone().run()
    problem.indices[10] = problem.indices[40]
    problem.indices[20] = 500
    done = problem.clone().with_(indices=problem.indices).run()
    bad = [10, 20, 40]
    good = [row for row in range(64) if row not in bad]
    assert_same_bits(done.out[good], clean.out[good], "clean rows")
    assert not done.out[bad].any()
    untouched = [i for i in range(67) if i not in problem.indices[good].tolist()]
    assert_same_bits(
        done.conv_state[untouched], problem.conv_state[untouched], "slots of bad rows and of none"
    )


def test_many_launches_share_one_status():
    """A fault stays until the caller clears it; good launches leave it alone."""
    problem = make_problem(4, 520, device="cuda", indices=[0, 5, 5, 1], on_bad_index="report")
    plan = problem.compiled()
    good = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device="cuda")
    problem.execute(plan)
    problem.execute(plan, conv_state_indices=good)
    with pytest.raises(BadSlotError, match=r"row 1: slot 5 \(duplicate\), row 2: slot 5"):
        check_status(problem.status)
    problem.status.zero_()
    problem.execute(plan, conv_state_indices=good)
    check_status(problem.status)


def test_report_is_captured_and_reads_indices_at_replay():
    problem = make_problem(4, 520, device="cuda", indices=[0, 1, 2, 3], on_bad_index="report")
    plan = problem.compiled()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.execute(plan)
    graph.replay()
    check_status(problem.status)
    problem.indices.copy_(torch.tensor([0, 6, 6, -9]))
    expected = expect(problem)
    graph.replay()
    assert_matches(problem, expected)
    with pytest.raises(BadSlotError):
        check_status(problem.status)


TRAP_PROGRAM = """
import os
import sys
import torch
from cudnn_blocks import ops

indices = [int(slot) for slot in sys.argv[1].split(",")]
channels, num_slots = int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
x = torch.randn(len(indices), channels, device="cuda").bfloat16()
state = torch.randn(num_slots, channels, 4, device="cuda").bfloat16()
weight = torch.randn(channels, 4, device="cuda").bfloat16()
slots = torch.tensor(indices, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
print("LAUNCHING", flush=True)
y = ops.causal_conv1d_update(x, state, weight, conv_state_indices=slots)
print("LAUNCHED", flush=True)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("SURFACED", type(error).__name__, str(error).splitlines()[0], flush=True)
    os._exit(3)  # nothing more can be done with this context, tear-down included
good = [i for i, slot in enumerate(indices) if slot != -1]
assert y[good].abs().sum() > 0
assert not y[[i for i, slot in enumerate(indices) if slot == -1]].any()
print("FINE", flush=True)
"""


def run_trap(indices, channels, num_slots=4):
    return subprocess.run(
        [
            sys.executable,
            "-c",
            TRAP_PROGRAM,
            ",".join(map(str, indices)),
            str(channels),
            str(num_slots),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


@pytest.mark.parametrize("channels", [8, 8192])
@pytest.mark.parametrize("indices", [[1, 1], [0, 4], [0, -2]], ids=["twice", "beyond", "below"])
def test_a_bad_slot_surfaces_at_the_next_synchronize(indices, channels):
    done = run_trap(indices, channels)
    assert "LAUNCHED" in done.stdout, f"the trap is not asynchronous: {done.stdout}{done.stderr}"
    assert "SURFACED" in done.stdout, f"nothing surfaced: {done.stdout}{done.stderr}"
    assert done.returncode == 3


@pytest.mark.parametrize("distance", [3, 130, 1000])
def test_duplicates_far_apart_trap_too(distance):
    indices = list(range(1024))
    indices[20 + distance] = 20
    done = run_trap(indices, 2048, 1024)
    assert done.returncode == 3, done.stdout + done.stderr


@pytest.mark.parametrize("indices", [[-1, 0, -1], [3, 1, 0, 2], [-1, -1, 2]])
def test_legal_slots_do_not_trap(indices):
    done = run_trap(indices, 520)
    assert (done.returncode, "FINE" in done.stdout) == (0, True), done.stdout + done.stderr
