# SPDX-License-Identifier: Apache-2.0
"""Consecutive steps equal one full causal convolution; slots come and go as requests do."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.conv1d_problem import STATE_FORMS, make_problem, ulp_distance
from tests.helpers.tensors import assert_same_bits
from tests.oracles.causal_conv1d_update_reference import full_causal_conv

pytestmark = pytest.mark.gpu
NUM_TOKENS = 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("width", "state_len", "layout"), STATE_FORMS)
def test_steps_equal_the_full_convolution(width, state_len, layout, dtype):
    problem = make_problem(
        3, 521, width, state_len, layout, dtype=dtype, has_bias=True, device="cuda"
    )
    problem.conv_state.zero_()
    plan = problem.compiled()
    tokens = torch.randn(NUM_TOKENS, 3, 521, device="cuda").to(dtype)
    exact = full_causal_conv(tokens.cpu(), problem.weight.cpu(), problem.bias.cpu()).cuda()
    for t in range(NUM_TOKENS):
        problem.execute(plan, x=tokens[t].clone())
        rounded = exact[t].to(dtype)
        off = ulp_distance(problem.out, rounded) > 1
        # Where terms cancel, FP32 sums differ from FP64 by more than the result's own rounding.
        error = (problem.out.double() - exact[t]).abs()
        assert not bool((off & (error > 2.0**-20)).any()), f"token {t}"
    assert_same_bits(problem.conv_state, tokens[-state_len:].permute(1, 2, 0), "state")


def test_continuous_batching_equals_every_request_alone():
    """Requests of different lengths share a pool; slots are reused; padding fills the batch."""
    channels, num_slots, batch = 520, 3, 4
    lengths = [5, 2, 7, 1, 4, 3]
    tokens = [torch.randn(n, channels, device="cuda").bfloat16() for n in lengths]
    pool = make_problem(
        batch, channels, device="cuda", indices=[-1] * batch, num_slots=num_slots
    ).with_(activation="silu")
    plan = pool.compiled()
    waiting, running, outputs = list(range(len(lengths))), {}, [[] for _ in lengths]
    free, final = list(range(num_slots)), {}
    while waiting or running:
        while waiting and free:
            slot = free.pop()
            pool.conv_state[slot].zero_()
            running[waiting.pop(0)] = slot
        active = list(running.items())
        pool.x.fill_(float("nan"))
        pool.indices.fill_(-1)
        for row, (request, slot) in enumerate(active):
            pool.x[row] = tokens[request][len(outputs[request])]
            pool.indices[row] = slot
        pool.execute(plan)
        for row, (request, slot) in enumerate(active):
            outputs[request].append(pool.out[row].clone())
            if len(outputs[request]) == lengths[request]:
                final[request] = pool.conv_state[slot].clone()
                free.append(running.pop(request))

    for request, length in enumerate(lengths):
        alone = make_problem(1, channels, device="cuda").with_(
            weight=pool.weight, activation="silu"
        )
        alone.conv_state.zero_()
        alone_plan = alone.compiled()
        for t in range(length):
            alone.execute(alone_plan, x=tokens[request][t : t + 1].contiguous())
            assert_same_bits(outputs[request][t], alone.out[0], f"request {request} token {t}")
        assert_same_bits(final[request], alone.conv_state[0], f"final state of {request}")


def test_a_prefill_hand_off():
    """The last W - 1 tokens of a full convolution, channel-last, go straight into decoding."""
    num_rows, channels, prefill, decode = 3, 520, 6, 4
    problem = make_problem(num_rows, channels, 4, 3, "channel_last", device="cuda")
    tokens = torch.randn(prefill + decode, num_rows, channels, device="cuda").bfloat16()
    storage = tokens[prefill - 3 : prefill].transpose(0, 1).contiguous()  # [N, 3, D]
    problem = problem.with_(conv_state=storage.transpose(1, 2))
    plan = problem.compiled()
    exact = full_causal_conv(tokens.cpu(), problem.weight.cpu(), None).cuda()
    for t in range(prefill, prefill + decode):
        problem.execute(plan, x=tokens[t].clone())
        error = (problem.out.double() - exact[t]).abs()
        assert bool((error <= exact[t].abs() * 2.0**-8 + 2.0**-20).all())
    assert_same_bits(storage, tokens[-3:].transpose(0, 1), "the caller's storage")
