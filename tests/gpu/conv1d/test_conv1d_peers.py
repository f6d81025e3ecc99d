# SPDX-License-Identifier: Apache-2.0
"""Outside oracles: FLA's ``ShortConvolution.step`` and ``cudnn.ops.causal_conv1d_update``."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from tests.helpers.conv1d_problem import make_problem, ulp_distance
from tests.helpers.tensors import assert_same_bits

pytestmark = pytest.mark.gpu
REQUIRED = os.environ.get("CUDNN_BLOCKS_REQUIRE_PEERS") == "1"
STEPS = 5


def peer(name: str):
    """The peer's module. Absent it is a failure where peers are required, else a skip."""
    if REQUIRED:
        return importlib.import_module(name)
    return pytest.importorskip(name, exc_type=ImportError)


def assert_close(
    ours: torch.Tensor, theirs: torch.Tensor, what: str, slack: float = 2.0**-12
) -> None:
    """One rounding apart, or as far as FP32 sums in another order are."""
    off = ulp_distance(ours, theirs) > 1
    error = (ours.double() - theirs.double()).abs()
    wrong = off & (error > slack)
    assert not bool(wrong.any()), f"{what}: {int(wrong.sum())} outputs differ"


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "channels"), [(1, 2048), (3, 521), (128, 4096)])
def test_flash_linear_attention(activation, has_bias, num_rows, channels):
    short_convolution = peer("fla.modules").ShortConvolution
    layer = short_convolution(
        *(channels, 4),
        bias=has_bias,
        activation=activation,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
    )
    layer.requires_grad_(False)
    problem = make_problem(
        num_rows, channels, device="cuda", has_bias=has_bias, activation=activation
    )
    problem = problem.with_(
        weight=layer.weight.view(channels, 4).contiguous(),
        bias=layer.bias.clone() if has_bias else None,
    )
    plan, theirs = problem.compiled(), problem.conv_state.clone()
    for t in range(STEPS):
        x = torch.randn(num_rows, channels, device="cuda").bfloat16()
        problem.execute(plan, x=x)
        y, theirs = layer.step(x.unsqueeze(1), None, theirs, output_final_state=True)
        assert_close(problem.out, y.view_as(problem.out), f"step {t}")
        assert_same_bits(problem.conv_state, theirs, f"state after step {t}")


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("indices", [None, [4, -1, 0]])
@pytest.mark.parametrize(
    ("state_len", "layout"), [(4, "compact"), (3, "compact"), (3, "channel_last")]
)
def test_cudnn_frontend(activation, has_bias, indices, state_len, layout):
    update = peer("cudnn").ops.causal_conv1d_update
    problem = make_problem(
        *(3, 2048, 4, state_len, layout),
        device="cuda",
        has_bias=has_bias,
        activation=activation,
        indices=indices,
        num_slots=6,
    )
    theirs, plan = problem.clone(), problem.compiled()
    for t in range(STEPS):
        x = torch.randn(3, 2048, device="cuda").bfloat16()
        problem.execute(plan, x=x)
        y = update(
            x,
            theirs.conv_state,
            theirs.weight,
            theirs.bias,
            activation,
            conv_state_indices=theirs.indices,
        )
        # Its SiLU goes through tanh.approx: |acc| * 2**-12 off.
        assert_close(problem.out, y, f"step {t}", slack=2.0**-8 if activation else 2.0**-12)
        assert_same_bits(problem.conv_state, theirs.conv_state, f"state after step {t}")
