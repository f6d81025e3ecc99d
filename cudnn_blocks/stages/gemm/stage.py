# SPDX-License-Identifier: Apache-2.0
"""The matrix product stage, plain or with QK-norm and RoPE: engines, compile, launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks.reference import gemm as reference
from cudnn_blocks.stages.capabilities import Capabilities, Constraint, OneOf
from cudnn_blocks.stages.constraints import MultipleOf, NoneOr, UpTo
from cudnn_blocks.stages.cudnn_graph import CUDNN, declines_of, facts_of
from cudnn_blocks.stages.cudnn_graph import SERVED as CUDNN_SERVED
from cudnn_blocks.stages.gemm.epilogues import D_HEADS, NormRope
from cudnn_blocks.stages.kernel_stage import KernelChoice, KernelStage
from cudnn_blocks.stages.stage import REFERENCE
from cudnn_blocks.stages.toolchain import DslRequirement
from cudnn_blocks.target import GPU_TARGET_NAMES, Target

HOPPER, PORTABLE = "hopper", "portable"
DSL = DslRequirement((4, 8, 1))

NUM_PLAIN = 3
"""Operands of a plain product."""
VECTOR = 8
"""Elements of a 16-byte access: rows and pitches are multiples of it."""
MAX_ROWS = 2**31 - 2**16
"""Rows over B and S, which the kernels number in 32 bits."""

_DTYPES: Mapping[str, Constraint] = {"dtype": OneOf(("bf16", "fp16"))}
_SIZES: Mapping[str, Constraint] = {
    **_DTYPES,
    "n": MultipleOf(VECTOR),
    "k": MultipleOf(VECTOR),
    "rows": UpTo(MAX_ROWS),
}
_SERVED: Mapping[str, Constraint] = {
    **_SIZES,
    "normed_d_head": NoneOr(OneOf(D_HEADS), "the projection, then qk_norm_rope"),
}


@dataclass(frozen=True)
class GemmModes:
    """Sizes and compile-time facts."""

    n: int
    """Columns of y."""
    k: int
    """Columns of x."""
    dtype: str
    """``bf16`` or ``fp16``."""
    norm_rope: NormRope | None = None
    """Bands and modes of the fused epilogue, or None for a plain product."""


class GemmStage(KernelStage):
    """``y = A(x @ w.T)``, or that with QK-norm and RoPE on the FP32 sums; one launch of a kernel.

    Operands: x ``[B, S, K]``, w ``[N, K]``, y ``[B, S, N]``, whose rows over B and S lie at one
    pitch each; with ``norm_rope`` also w_q_norm and w_k_norm ``[D]`` or None, cos and sin
    ``[B, T, rope_dim]`` or None. A plain product may be given those all the same and does not look.
    The cuDNN engine takes contiguous operands.

    Args:
        name: of the slot that the stage fills.
        modes: sizes and compile-time facts.
        num_rows: the largest B * S; the tile is chosen for it.
        target: what to compile for.
        engine: pin.
        eps: added to the mean square; an argument of the kernel, not compiled in.
        device: of the samples; the cuDNN engine builds its plans there.
    """

    name = "gemm"
    rows = (
        Capabilities(engine=HOPPER, targets=OneOf(("sm_90a",)), serves=_SERVED, dsl=DSL),
        Capabilities(engine=PORTABLE, targets=OneOf(GPU_TARGET_NAMES), serves=_SERVED, dsl=DSL),
        Capabilities(
            engine=CUDNN,
            targets=OneOf(GPU_TARGET_NAMES),
            serves={**_SIZES, "normed_d_head": OneOf((None,)), **CUDNN_SERVED},
        ),
        Capabilities(
            engine=REFERENCE,
            targets=OneOf(("cpu",)),
            serves=_DTYPES,
            evidence={"cpu": "tests/unit/test_gemm_reference.py"},
        ),
    )

    def __init__(
        self,
        name: str,
        modes: GemmModes,
        num_rows: int,
        target: Target,
        engine: str | None = None,
        *,
        eps: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        norm_rope = modes.norm_rope
        facts = {
            "dtype": modes.dtype,
            "n": modes.n,
            "k": modes.k,
            "rows": num_rows,
            "normed_d_head": None if norm_rope is None else norm_rope.d_head,
            **facts_of(device),
        }
        super().__init__(facts, target, engine)
        self.name = name  # type: ignore[misc]  # a block has several of these, each in its slot
        self.modes = modes
        self.num_rows = num_rows
        self.eps = eps
        self._plans: Any = None

    def check(self) -> None:
        """Chooses the engine; builds the plans of a cuDNN one, so that nothing is left open."""
        super().check()
        if self.engine == CUDNN:
            from cudnn_blocks.stages.gemm.cudnn import CudnnGemm

            modes = self.modes
            device: Any = self.facts["device"]
            with declines_of(self):
                self._plans = CudnnGemm.build(self.num_rows, modes.n, modes.k, modes.dtype, device)

    def compile(self) -> None:
        """Compiles the kernel; a cuDNN engine has its plans already."""
        if self.engine != CUDNN:
            super().compile()

    def launch(self, operands: Sequence[torch.Tensor | None], stream: int) -> None:
        """One launch of a kernel, or a few of cuDNN."""
        if self.engine == CUDNN:
            self._plans.launch(*operands[:NUM_PLAIN], stream)
        else:
            super().launch(operands, stream)

    def smem_bytes(self) -> int:
        """Shared memory of one CTA; 0 for cuDNN, which does not say."""
        return 0 if self.engine == CUDNN else super().smem_bytes()

    def _choose_kernel(self) -> KernelChoice:
        if self.engine == HOPPER:
            from cudnn_blocks.stages.gemm import hopper as kernels
        else:
            from cudnn_blocks.stages.gemm import portable as kernels  # type: ignore[no-redef]
        modes = self.modes
        config = kernels.GemmKernelConfig.from_geometry(
            self.num_rows,
            modes.n,
            modes.k,
            self.target,
            dtype=modes.dtype,
            norm_rope=modes.norm_rope,
        )
        kernel = kernels.GemmKernel if modes.norm_rope is None else kernels.GemmNormRopeKernel
        return KernelChoice(kernel, config, kernels.fake_operands, kernels.smem_bytes)

    def _kernel_operands(self, operands: Sequence[torch.Tensor | None]) -> Sequence[Any]:
        if self.modes.norm_rope is None:
            return operands[:NUM_PLAIN]
        return [*operands, self.eps]

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        norm_rope = self.modes.norm_rope
        if norm_rope is None:
            reference.gemm(*operands[:NUM_PLAIN])
        else:
            x, w, y, *small = operands
            reference.gemm_norm_rope(x, w, y, tuple(small), self.eps, norm_rope.heads)

    def describe(self) -> str:
        """Sizes, epilogue, and the tile of the kernel or the name of the plan."""
        modes = self.modes
        parts = [f"N={modes.n}, K={modes.k}, {modes.dtype}"]
        if modes.norm_rope is not None:
            parts.append(str(modes.norm_rope))
        if self.engine == REFERENCE:
            parts.append("allocates")
        elif self.engine == CUDNN:
            parts.append(str(self._plans))
        else:
            config: Any = self._choose_kernel().config
            parts.append(str(config.tile))
        return ", ".join(parts)
