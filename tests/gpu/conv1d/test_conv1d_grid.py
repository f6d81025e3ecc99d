# SPDX-License-Identifier: Apache-2.0
"""Every specialisation of the update against the FP32 reference; states bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.helpers.conv1d_problem import STATE_FORMS, assert_matches, expect, make_problem
from tests.helpers.tensors import random_bits

pytestmark = pytest.mark.gpu

BATCHES = (1, 3, 8, 257)
OTHER_CHANNELS = (1, 5, 8, 521, 8192, 12288)
WIDE_CHANNELS = (65535, 65536, 65537)
DTYPES = (torch.bfloat16, torch.float16)
INDICES = (None, "trap", "report")

forms = pytest.mark.parametrize(("width", "state_len", "layout"), STATE_FORMS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])


def run_batches(batches, channels, form, *, pitches=(0, 8), on_bad_index=None, **knobs):
    """One plan, made for the largest batch, runs all of them, compact and padded."""
    routed = {} if on_bad_index is None else {"indices": "shuffled", "on_bad_index": on_bad_index}

    def problem(num_rows: int, extra: int):
        pitch = -(-(channels + extra) // 8) * 8 if extra else channels
        return make_problem(
            num_rows, channels, *form, device="cuda", pitch=pitch, **routed, **knobs
        )

    plan = problem(max(batches), 0).compiled()
    for num_rows, extra in itertools.product(batches, pitches):
        case = problem(num_rows, extra)
        expected = expect(case)
        case.execute(plan)
        assert_matches(case, expected, f"N={num_rows} ld={case.x.stride(0)}")


@forms
@dtypes
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("on_bad_index", INDICES)
def test_every_specialisation(width, state_len, layout, dtype, activation, has_bias, on_bad_index):
    run_batches(
        BATCHES,
        2048,
        (width, state_len, layout),
        dtype=dtype,
        activation=activation,
        has_bias=has_bias,
        on_bad_index=on_bad_index,
    )


@forms
@pytest.mark.parametrize("on_bad_index", INDICES)
@pytest.mark.parametrize("channels", OTHER_CHANNELS)
def test_other_numbers_of_channels(width, state_len, layout, on_bad_index, channels):
    run_batches(
        BATCHES,
        channels,
        (width, state_len, layout),
        dtype=DTYPES[channels % 2],
        activation="silu",
        has_bias=True,
        on_bad_index=on_bad_index,
    )


@forms
@pytest.mark.parametrize("channels", WIDE_CHANNELS)
def test_more_channels_than_a_grid_axis_holds(width, state_len, layout, channels):
    """S05: 65535 is the limit of grid y and z."""
    run_batches((1, 3), channels, (width, state_len, layout), activation="silu", has_bias=True)


@forms
@dtypes
def test_states_move_bit_for_bit(width, state_len, layout, dtype):
    """NaN payloads, infinities and subnormals, through the state and in from x."""
    for channels, num_rows in itertools.product((5, 2048), (3, 1025)):
        problem = make_problem(
            num_rows, channels, width, state_len, layout, dtype=dtype, device="cuda"
        )
        problem.conv_state.copy_(random_bits((num_rows, channels, state_len), dtype, "cuda"))
        problem = problem.with_(x=random_bits((num_rows, channels), dtype, "cuda"))
        history = torch.cat([problem.conv_state, problem.x.unsqueeze(2)], dim=2)
        expected = history.contiguous().view(torch.int16)[:, :, 1:]
        done = problem.run()
        assert torch.equal(done.conv_state.contiguous().view(torch.int16), expected)
