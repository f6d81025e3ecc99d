# SPDX-License-Identifier: Apache-2.0
"""The peers, each at its best: cuDNN through torch, alone, eager and under torch.compile.

All of them take channels-last tensors, with ``cudnn.benchmark`` on; the profiler has to show cuDNN.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.conv3d import chain
from benchmarks.harness.arm import Arm, Launch, Missing, Offer, Role, offer
from benchmarks.harness.inductor import NO_GPU, compiled, inductor_words
from benchmarks.harness.kernels import cudnn_arm

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.conv3d.causal_problem import CausalProblem
    from benchmarks.conv3d.problem import Conv3dProblem, Tensors

    Layer = Callable[..., dict[str, Any]]
    Bind = Callable[[Tensors], Launch]

CONV, COMPILED, EAGER = "torch-conv3d", "torch-compile", "torch-eager"
CAUSAL_CHANNELS = (12, 16)
"""As they are, and padded to a multiple of eight."""


def _arm(
    name: str, bind: Bind, sample: Tensors, device: str, what: str, role: Role = Role.PEER
) -> Arm:
    if device == "cpu":
        return Arm(name, role, f"{what}, cpu", bind)
    return cudnn_arm(name, bind, sample, what, role)


def conv_alone(sample: Tensors, device: str, role: Role = Role.PEER) -> Offer:
    """The convolution without anything around it."""

    def bind(buffers: Tensors) -> Launch:
        return lambda: {"output": chain.convolve(buffers["input"], buffers["weight"])}

    return offer(CONV, lambda: _arm(CONV, bind, sample, device, "channels last", role))


def layer_peers(
    layer: Layer,
    operands: Callable[[Tensors], tuple[Any, ...]],
    sample: Tensors,
    device: str,
    *,
    is_tuned: bool,
) -> list[Offer]:
    """A whole layer under torch.compile and eager."""
    eager = partial(_bind, layer, operands)
    offers = [offer(EAGER, lambda: _arm(EAGER, eager, sample, device, "op by op"))]
    if device == "cpu":
        return [Missing(COMPILED, NO_GPU), *offers]
    bind = partial(_bind, compiled(layer, is_tuned=is_tuned), operands)
    what = inductor_words(is_tuned=is_tuned)
    return [offer(COMPILED, lambda: _arm(COMPILED, bind, sample, device, what)), *offers]


def fused_peers(problem: Conv3dProblem, sample: Tensors, device: str) -> list[Offer]:
    """The layer two ways, and the convolution alone as a yardstick: it does less."""
    return [
        *layer_peers(
            chain.fused_layer, problem.layer_operands, sample, device, is_tuned=problem.is_tuned
        ),
        conv_alone(sample, device, Role.YARDSTICK),
    ]


def causal_peers(problem: CausalProblem, sample: Tensors, device: str) -> list[Offer]:
    """The convolution alone on input packed beforehand, and the whole layer as ours does it."""
    offers = []
    for channels in CAUSAL_CHANNELS:
        name = f"{CONV}-c{channels}"

        def bind(buffers: Tensors, channels: int = channels) -> Launch:
            x, weight = problem.padded(buffers, channels)
            return lambda: {"output": chain.convolve(x, weight)}

        build = partial(_arm, name, bind, sample, device, "packed beforehand")
        offers.append(offer(name, build))
    return [
        *offers,
        *layer_peers(chain.causal_layer, problem.layer_operands, sample, device, is_tuned=False),
    ]


def _bind(layer: Layer, operands: Callable[[Tensors], tuple[Any, ...]], buffers: Tensors) -> Launch:
    return partial(layer, *operands(buffers))
