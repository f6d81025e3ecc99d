# SPDX-License-Identifier: Apache-2.0
"""The peers, each at its best: cuBLAS, torch.compile, other attentions, and chains of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gated_attention_block import chain, data
from benchmarks.gated_attention_block.attention_peers import CUDNN_PEERS, builders_of
from benchmarks.harness.arm import Arm, Launch, Missing, Offer, Role, offer
from benchmarks.harness.inductor import NO_GPU, compiled, inductor_words
from benchmarks.harness.kernels import cudnn_arm
from cudnn_blocks import SdpaGeometry

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gated_attention_block.attention_peers import Build
    from benchmarks.gated_attention_block.block_problem import BlockProblem
    from benchmarks.gated_attention_block.pointwise_problem import GateProblem, NormRopeProblem
    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.gated_attention_block.sdpa_problem import SdpaProblem

CUBLAS, COMPILED, EAGER = "cublas", "torch-compile", "torch-eager"


def cublas() -> Arm:
    """``torch.mm`` into the result, in variants without an epilogue."""

    def bind(buffers: Tensors) -> Launch:
        x, w, y = (buffers[name] for name in "xwy")
        return partial(_product, x[0], w.t(), y[0])

    return Arm(CUBLAS, Role.PEER, "torch.mm", bind)


def attention_peers(problem: SdpaProblem, sample: Tensors, device: str) -> list[Offer]:
    """Every other attention."""
    return [
        offer(name, partial(_attention_arm, name, build, problem, sample, device))
        for name, build in builders_of(device).items()
    ]


def _attention_arm(
    name: str, build: Build, problem: SdpaProblem, sample: Tensors, device: str
) -> Arm:
    found = build(*(sample[each] for each in "qkv"), problem.geometry)

    def bind(buffers: Tensors) -> Launch:
        q, k, v = (buffers[each] for each in "qkv")
        return lambda: {"o": found.attend(q, k, v)}

    if name in CUDNN_PEERS and device != "cpu":
        return cudnn_arm(name, bind, sample, found.words)
    return Arm(name, Role.PEER, found.words, bind)


def norm_rope_peers(problem: NormRopeProblem, device: str) -> list[Offer]:
    """Norm and rotation into new tensors."""

    def bind(function: Callable[..., Any], buffers: Tensors) -> Launch:
        operands = [buffers[name] for name in ("q", "k", *data.SMALL)]
        eps = problem.geometry.qk_norm_eps
        return lambda: dict(zip("qk", function(*operands, eps), strict=True))

    return _compiled_and_eager(chain.norm_rope, bind, device)


def gate_peers(problem: GateProblem, device: str) -> list[Offer]:
    """The gate into a new tensor."""
    del problem

    def bind(function: Callable[..., Any], buffers: Tensors) -> Launch:
        return lambda: {"out": function(buffers["o"], buffers["gate"])}

    return _compiled_and_eager(chain.gate, bind, device)


def _compiled_and_eager(
    function: Callable[..., Any], bind: Callable[..., Launch], device: str
) -> list[Offer]:
    eager = Arm(EAGER, Role.PEER, "op by op", partial(bind, function))
    if device == "cpu":
        return [Missing(COMPILED, NO_GPU), eager]
    words = inductor_words(is_tuned=False)
    return [
        offer(COMPILED, lambda: Arm(COMPILED, Role.PEER, words, partial(bind, compiled(function)))),
        eager,
    ]


def chain_peers(problem: BlockProblem, sample: Tensors, device: str) -> list[Offer]:
    """The whole block, once per attention; cuBLAS, norm, RoPE and gate are the same in all."""
    functions = (chain.norm_rope, chain.gate)
    if device != "cpu":
        # Both before either is called: compiling drops what was compiled before.
        functions = tuple(compiled(function) for function in functions)
    whole = chain.Chain(problem.geometry, *functions)
    return [
        offer(f"chain-{name}", partial(_chain_arm, f"chain-{name}", build, whole, sample))
        for name, build in builders_of(device).items()
    ]


def _chain_arm(name: str, build: Build, whole: chain.Chain, sample: Tensors) -> Arm:
    q, k, v, _ = whole.before(sample)
    found = build(q, k, v, SdpaGeometry.of(whole.geometry))

    def bind(buffers: Tensors) -> Launch:
        return partial(whole.run, buffers, found.attend)

    return Arm(name, Role.PEER, f"cuBLAS, Inductor, {found.words}", bind)


def _product(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    torch.mm(x, w, out=y)
