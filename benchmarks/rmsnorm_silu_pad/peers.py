# SPDX-License-Identifier: Apache-2.0
"""The peers of the norm: torch under Inductor, and eager."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.harness.arm import Arm, Launch, Missing, Offer, Role
from benchmarks.harness.inductor import NO_GPU, compiled, inductor_words
from benchmarks.rmsnorm_silu_pad.problem import layer

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.rmsnorm_silu_pad.problem import NormProblem, Tensors

COMPILED = "torch-compile"


def norm_peers(problem: NormProblem, device: str) -> list[Offer]:
    """Every peer of a case."""
    eager = Arm("torch-eager", Role.PEER, "op by op", partial(_bind, problem, layer))
    if device == "cpu":
        return [Missing(COMPILED, NO_GPU), eager]
    function = compiled(layer, is_tuned=problem.is_tuned)
    words = inductor_words(is_tuned=problem.is_tuned)
    return [Arm(COMPILED, Role.PEER, words, partial(_bind, problem, function)), eager]


def _bind(problem: NormProblem, function: Callable[..., Any], buffers: Tensors) -> Launch:
    return partial(function, *problem.layer_operands(buffers))
