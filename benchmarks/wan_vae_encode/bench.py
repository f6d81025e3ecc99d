# SPDX-License-Identifier: Apache-2.0
"""How ``encode`` is measured: accelerated, eager, channels last and under torch.compile.

Set-up and warm-up are outside the timing: packing, compiling, choosing cuDNN's algorithms. Inside
are the patches, all allocations, and every copy of history. Memory is counted with the weights of
the encoder, and without the video.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from benchmarks.gated_attention_block.sampled import near
from benchmarks.harness.arm import Arm, Launch, Missing, Offer, Role, offer, own
from benchmarks.harness.inductor import NO_GPU
from benchmarks.harness.package_case import PackageCase
from benchmarks.wan_vae_encode.problem import EncodeProblem, encode
from cudnn_blocks.integrations.diffusers import accelerate_vae_encoder
from cudnn_blocks.integrations.patching import TORCH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.harness.case import Lab, Outcome
    from benchmarks.harness.timing import GraphTimer
    from benchmarks.wan_vae_encode.problem import Tensors

OURS, EAGER, LAST, COMPILED = "ours", "eager", "channels_last_3d", "torch-compile"
COMPILED_LAST = f"{COMPILED}-{LAST}"
ENGINES = {
    COMPILED: "Inductor, cuDNN",
    COMPILED_LAST: "Inductor, cuDNN",
    EAGER: "cuDNN, op by op",
    LAST: "cuDNN, op by op",
}
"""The peers, and what runs them."""
LIMIT = 6e-2
"""Of a row's error to the FP32 model, relative to its size: the roundings of some 60 layers, which
are up to 0.037 of it in the eager model."""
RECOMPILES = 64
"""Of one call: a clip's chunks differ in what they find in the caches."""
MIB = 1 << 20


@functools.cache
def prepared(problem_changes: tuple[tuple[str, Any], ...], arm: str, device: str) -> Any:
    """The model of an arm, kept for all lengths of clip: its compilation takes minutes."""
    vae = EncodeProblem(1, changes=dict(problem_changes)).model(device)
    if arm in (LAST, COMPILED_LAST):
        to_channels_last(vae)
    if arm in (COMPILED, COMPILED_LAST):
        # Not harness.compiled: it drops what was compiled before, and both arms are kept.
        torch._dynamo.config.recompile_limit = RECOMPILES
        vae.encoder.forward = torch.compile(vae.encoder.forward, fullgraph=True, dynamic=False)
    return vae


def to_channels_last(vae: Any) -> None:
    """Every filter channels last; activations follow from the first convolution on."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            module.weight.data = module.weight.data.contiguous(
                memory_format=formats[module.weight.ndim]
            )


class EncodeCase(PackageCase):
    """The model's own call, as a program makes it, without a graph.

    Args:
        problem: the clip.
        device: where.
        only: the one peer that competes, whose name joins the case's; None for all of them.
    """

    family = "encode"
    kinds = (family, "latency")
    modes = ("eager",)
    package = "diffusers"

    def __init__(
        self, problem: EncodeProblem, device: str = "cuda", *, only: str | None = None
    ) -> None:
        super().__init__(problem, device)
        self.problem = problem
        self.name = f"{problem.name}-{only}" if only else problem.name
        self._only = only
        self._key = tuple(problem.changes.items())
        self._peaks: dict[str, str] = {}

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        del sets, timer
        names = [name for name in ENGINES if self._only in (None, name)]
        return [own(OURS, self._our_arm), *map(self._offer, names)]

    def _offer(self, name: str) -> Offer:
        if self.device == "cpu" and name in (COMPILED, COMPILED_LAST):
            return Missing(name, NO_GPU)
        return offer(name, functools.partial(self._peer, name))

    def _peer(self, name: str) -> Arm:
        vae = prepared(self._key, name, self.device)
        return Arm(name, Role.PEER, ENGINES[name], self._binding(vae))

    def _our_arm(self) -> Arm:
        vae = prepared(self._key, OURS, self.device)
        handle = accelerated(vae)
        handle.warm(self.problem.height, self.problem.width)
        explanation = handle.explain()
        engines = dict.fromkeys(row.engine for row in explanation.rows if row.engine != TORCH)
        return Arm(
            OURS, Role.OURS, ", ".join(engines), self._binding(vae), description=str(explanation)
        )

    def _binding(self, vae: Any) -> Callable[[Tensors], Launch]:
        return lambda buffers: lambda: encode(vae, buffers["video"])

    @override
    def check(self, arm: Arm) -> str | None:
        if self._truth is None:
            buffers = self.problem.make_set(self.device)
            self._truth = buffers, self.problem.expected(buffers, self.device)
        buffers, expected = self._truth
        call = arm.bind(buffers)
        wrong = near(call(), expected, LIMIT)
        if wrong is None and self.device != "cpu":
            vae = prepared(self._key, arm.name, self.device)
            self._peaks[arm.name] = peak_memory(vae, call)
        return wrong

    @override
    def _measure(self, lab: Lab) -> Outcome:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            outcome = super()._measure(lab)
        rows = [
            row.model_copy(update={"note": self._peaks[row.arm]})
            if row.status == "ok" and row.arm in self._peaks
            else row
            for row in outcome.rows
        ]
        outcome.rows[:] = rows
        return outcome


@functools.cache
def accelerated(vae: Any) -> Any:
    """The handle on a model, once."""
    return accelerate_vae_encoder(vae)


def peak_memory(vae: Any, call: Launch) -> str:
    """Of one call after a first one: the encoder's weights and all that the call allocates."""
    storages = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for parameter in vae.encoder.parameters()
    }
    weights = sum(storages.values())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    total = weights + torch.cuda.max_memory_allocated() - before
    return f"peak {total / MIB:,.0f} MiB, of it weights {weights / MIB:,.0f}"
