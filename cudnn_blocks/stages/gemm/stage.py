# SPDX-License-Identifier: Apache-2.0
"""The matrix product stage, plain or with QK-norm and RoPE: engines, compile, launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cudnn_blocks.reference import gemm as reference
from cudnn_blocks.reference.gated_attention_precision import fp8_projection
from cudnn_blocks.stages.capabilities import Capabilities, Constraint, OneOf
from cudnn_blocks.stages.constraints import MultipleOf, NoneOr, UpTo
from cudnn_blocks.stages.cudnn_graph import CUDNN, declines_of, facts_of
from cudnn_blocks.stages.cudnn_graph import SERVED as CUDNN_SERVED
from cudnn_blocks.stages.gated_attention.evidence import CODES, EVIDENCE, SHOWN, TESTED
from cudnn_blocks.stages.gemm import hopper_config, portable_config
from cudnn_blocks.stages.gemm.epilogues import (
    D_HEADS,
    E4M3,
    PROMOTE_EVERY,
    NormRope,
    element_bytes,
)
from cudnn_blocks.stages.kernel_stage import KernelChoice, KernelStage
from cudnn_blocks.stages.stage import REFERENCE
from cudnn_blocks.stages.toolchain import DslRequirement
from cudnn_blocks.target import GPU_TARGET_NAMES, Target

HOPPER, PORTABLE = "hopper", "portable"
DSL = DslRequirement((4, 8, 1))

NUM_PLAIN = 3
"""Operands of a plain product."""
VECTOR = 8
"""16-bit elements of a 16-byte access: rows and pitches are multiples of it."""
VECTOR_BYTES = 16
MAX_ROWS = 2**31 - 2**16
"""Rows over B and S, which the kernels number in 32 bits."""

_DTYPES: Mapping[str, Constraint] = {"dtype": OneOf(("bf16", "fp16", E4M3))}
_SIZES: Mapping[str, Constraint] = {
    "n": MultipleOf(VECTOR),
    "k": MultipleOf(VECTOR),
    "rows": UpTo(MAX_ROWS),
}
_SERVED: Mapping[str, Constraint] = {
    **_DTYPES,
    **_SIZES,
    "k_bytes": MultipleOf(VECTOR_BYTES),
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
    """Of x and w: ``bf16`` or ``fp16``, as all else; or ``e4m3``, and all else is BF16."""
    norm_rope: NormRope | None = None
    """Bands and modes of the fused epilogue, or None for a plain product."""
    fast_accumulation: bool = False
    """An engine may keep all of K of codes in the tensor cores, at their precision."""
    has_alpha: bool = False
    """A plain product of 16-bit values has a factor too."""

    @property
    def is_fp8(self) -> bool:
        """Whether x and w are codes."""
        return self.dtype == E4M3

    @property
    def is_scaled(self) -> bool:
        """Whether the kernel takes a factor."""
        return self.is_fp8 or self.has_alpha

    @property
    def promote_every(self) -> int:
        """Stages of 128 codes between additions in FP32; 0 for one at the end."""
        return PROMOTE_EVERY if self.is_fp8 and not self.fast_accumulation else 0


KERNELS = {
    (False, False): "GemmKernel",
    (False, True): "GemmNormRopeKernel",
    (True, False): "GemmScaledKernel",
    (True, True): "GemmCodedNormRopeKernel",
}
"""Classes of each engine's file, by whether there is a factor, and norm and RoPE."""


class GemmStage(KernelStage):
    """``y = A(alpha * x @ w.T)``, or QK-norm and RoPE on those FP32 sums; one launch of a kernel.

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
        alpha: factor of the sums where there is one; an argument of the kernel too.

    Of codes with ``norm_rope`` Q, K and V become codes themselves. The operands are then x, w, q8,
    k8, v8 and gate ``[B, S, heads, D]``, compact, then the small ones; ``scale_q``, ``scale_k`` and
    ``scale_v`` are read at every launch, as ``alpha`` is.
        device: of the samples; the cuDNN engine builds its plans there.
    """

    name = "gemm"
    rows = (
        *(
            Capabilities(engine, OneOf(targets), _SERVED, DSL, EVIDENCE, SHOWN, codes)
            for engine, targets, codes in (
                (HOPPER, ("sm_90a",), CODES),
                (PORTABLE, GPU_TARGET_NAMES, TESTED),
            )
        ),
        Capabilities(
            engine=CUDNN,
            targets=OneOf(GPU_TARGET_NAMES),
            serves={
                "dtype": OneOf(("bf16", "fp16")),
                **_SIZES,
                "normed_d_head": OneOf((None,)),
                **CUDNN_SERVED,
            },
            evidence=EVIDENCE,
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
        alpha: float = 1.0,
        device: torch.device | None = None,
    ) -> None:
        norm_rope = modes.norm_rope
        facts = {
            "dtype": modes.dtype,
            "n": modes.n,
            "k": modes.k,
            "k_bytes": modes.k * element_bytes(modes.dtype),
            "rows": num_rows,
            "normed_d_head": None if norm_rope is None else norm_rope.d_head,
            **facts_of(device),
        }
        super().__init__(facts, target, engine)
        self.name = name  # type: ignore[misc]  # a block has several of these, each in its slot
        self.modes = modes
        self.num_rows = num_rows
        self.eps = eps
        self.alpha = alpha
        self.scale_q = self.scale_k = self.scale_v = 1.0
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
        configs: Any = {HOPPER: hopper_config, PORTABLE: portable_config}[self.engine]
        modes = self.modes
        config = configs.GemmKernelConfig.from_geometry(
            self.num_rows,
            modes.n,
            modes.k,
            self.target,
            dtype=modes.dtype,
            norm_rope=modes.norm_rope,
            promote_every=modes.promote_every,
            has_alpha=modes.has_alpha,
        )
        kernel = KERNELS[modes.is_scaled, modes.norm_rope is not None]
        return KernelChoice(
            f"cudnn_blocks.stages.gemm.{self.engine}.{kernel}", config, configs.smem_bytes(config)
        )

    def _kernel_operands(self, operands: Sequence[torch.Tensor | None]) -> Sequence[Any]:
        if self.modes.norm_rope is not None and self.modes.is_fp8:
            heads = (operand.flatten(2) for operand in operands[2:6])  # type: ignore[union-attr]
            scales = (self.scale_q, self.scale_k, self.scale_v)
            return [*operands[:2], *heads, *operands[6:], self.eps, self.alpha, *scales]
        if self.modes.norm_rope is not None:
            return [*operands, self.eps]
        product = operands[:NUM_PLAIN]
        return [*product, self.alpha] if self.modes.is_scaled else product

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        norm_rope = self.modes.norm_rope
        if norm_rope is None:
            x, w, y = operands[:NUM_PLAIN]
            reference.gemm(x, w, y, self.alpha)
        elif self.modes.is_fp8:
            scales = (self.scale_q, self.scale_k, self.scale_v)
            fp8_projection(*operands, self.eps, self.alpha, *scales)  # type: ignore[call-arg]
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
            parts.append(config.tile.describe(config.k_tile))
            if self.engine == HOPPER and modes.is_fp8:
                every = config.promote_every * config.k_tile
                parts.append(f"FP32 sums every {every} of K" if every else "fast accumulation")
        return ", ".join(parts)
