# SPDX-License-Identifier: Apache-2.0
"""How the layer is measured: accelerated, and under every attention backend of transformers."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from typing import TYPE_CHECKING

from torch.nn.attention import SDPBackend, sdpa_kernel
from typing_extensions import override

from benchmarks.gated_attention_block.sampled import near
from benchmarks.harness.arm import Arm, Launch, Offer, Role, offer, own
from benchmarks.harness.package_case import PackageCase
from cudnn_blocks.integrations.transformers import accelerate_gated_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from benchmarks.harness.timing import GraphTimer
    from benchmarks.qwen3_next_attention.problem import Buffers, LayerProblem

LIMIT = 2e-2
"""Of a row's error, relative to its size: the roundings of a BF16 layer."""
SDPA_BACKENDS = {
    "sdpa": None,  # torch chooses
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}
PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Other backends of transformers, and the package that each needs."""


class LayerCase(PackageCase):
    """The layer's own call, eager and as a graph, outputs allocated inside."""

    family = "layer"
    kinds = (family, "latency")
    modes = ("eager", "graph")
    has_equal_bursts = True
    package = "transformers.models.qwen3_next.modeling_qwen3_next"

    def __init__(self, problem: LayerProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Buffers], timer: GraphTimer | None) -> list[Offer]:
        del timer
        return [
            own("ours", lambda: _our_arm(sets[0])),
            *(
                offer(f"transformers-{name}", partial(build, name, sets[0]))
                for build, names in ((_sdpa_arm, SDPA_BACKENDS), (_flash_arm, PACKAGES))
                for name in names
            ),
        ]

    @override
    def check(self, arm: Arm) -> str | None:
        if self._truth is None:
            buffers = self.problem.make_set(self.device)
            self._truth = buffers, self.problem.expected(buffers)
        buffers, expected = self._truth
        return near(arm.bind(buffers)(), expected, LIMIT)


def _call(layer: torch.nn.Module, buffers: Buffers) -> torch.Tensor:
    return layer(buffers["h"], buffers["tables"], None)[0]


def _our_arm(sample: Buffers) -> Arm:
    def bind(buffers: Buffers) -> Launch:
        layer = copy.deepcopy(buffers["layer"])
        acceleration = accelerate_gated_attention(layer)

        def call() -> torch.Tensor:
            out = _call(layer, buffers)
            if acceleration.stats().original:
                raise AssertionError(f"the original ran: {acceleration.stats()}")
            return out

        return call

    layer = copy.deepcopy(sample["layer"])
    (row,) = accelerate_gated_attention(layer).explain().rows
    return Arm("ours", Role.OURS, row.engine, bind, description=f"{row.runs}: {row.engine}")


def _sdpa_arm(name: str, sample: Buffers) -> Arm:
    backend = SDPA_BACKENDS[name]

    def bind(buffers: Buffers) -> Launch:
        if backend is None:
            return partial(_call, buffers["layer"], buffers)

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return _call(buffers["layer"], buffers)

        return call

    bind(sample)()  # a backend that declines is missing, not wrong
    return Arm(f"transformers-{name}", Role.PEER, f"{name}, cuBLAS", bind)


def _flash_arm(name: str, sample: Buffers) -> Arm:
    if importlib.util.find_spec(PACKAGES[name]) is None:
        raise ImportError(f"{PACKAGES[name]} is not installed")

    def bind(buffers: Buffers) -> Launch:
        layer = copy.deepcopy(buffers["layer"])
        layer.config._attn_implementation = name
        call: Callable[..., torch.Tensor] = partial(_call, layer, buffers)
        return call

    bind(sample)()  # a backend that declines is missing, not wrong
    return Arm(f"transformers-{name}", Role.PEER, f"{name}, cuBLAS", bind)
