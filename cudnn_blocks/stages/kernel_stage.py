# SPDX-License-Identifier: Apache-2.0
"""KernelStage: a stage whose every GPU engine is one launch of one kernel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from cudnn_blocks.stages.capabilities import Facts
from cudnn_blocks.stages.kernel_cache import KERNELS, CompiledKernel, KernelBuild
from cudnn_blocks.stages.stage import REFERENCE, Stage
from cudnn_blocks.target import Target


@dataclass(frozen=True)
class KernelChoice:
    """One specialisation, as data: nothing of the CuTe DSL is imported to choose it."""

    kernel: str
    """Dotted name of the kernel class; its module has ``fake_operands(config)`` beside it."""
    config: Hashable
    smem_bytes: int
    """Shared memory of one CTA."""


class KernelStage(Stage):
    """Compiles through the kernel cache, whose key is the config and the target's name.

    Subclasses choose among config files, which need no CuTe DSL, and name the kernel's class; its
    file is imported when a compile is needed. Planning, probing and kernels that were compiled
    before need none.
    """

    def __init__(self, facts: Facts, target: Target, engine: str | None = None) -> None:
        super().__init__(facts, target, engine)
        self._call: Callable[..., object] | None = None

    @abstractmethod
    def _choose_kernel(self) -> KernelChoice:
        """The specialisation of the chosen engine, which is not the reference."""

    def _kernel_operands(
        self, operands: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """The stage's operands in the kernel's order; by default they are in it."""
        return operands

    def compile(self) -> None:
        """Compiles the one kernel of this specialisation."""
        if self.engine != REFERENCE:
            self._call = self.compiled_kernel().call

    def compiled_kernel(self, *, keep_cubin: bool = False) -> CompiledKernel:
        """The kernel of this specialisation; compiled afresh where the cubin is asked for."""
        choice = self._choose_kernel()
        build = KernelBuild(choice.kernel, choice.config, self.target)
        if keep_cubin:
            return build(keep_cubin=True)
        return KERNELS.get((choice.config, self.target.name), build)

    def smem_bytes(self) -> int:
        """Shared memory of one CTA."""
        if self.engine == REFERENCE:
            return 0
        return self._choose_kernel().smem_bytes

    def launch(self, operands: Sequence[torch.Tensor | None], stream: int) -> None:
        """One launch."""
        self._call(*self._kernel_operands(operands), stream)  # type: ignore[misc]
