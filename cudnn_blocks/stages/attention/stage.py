# SPDX-License-Identifier: Apache-2.0
"""The attention stage: engines, compile, launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cudnn_blocks.errors import NotServedError
from cudnn_blocks.geometry.gated_attention import GatedAttentionGeometry
from cudnn_blocks.geometry.sdpa import SdpaGeometry
from cudnn_blocks.reference.attention import AttentionMask, sdpa
from cudnn_blocks.stages.attention import hopper_config, portable_config
from cudnn_blocks.stages.attention.facts import SdpaFacts
from cudnn_blocks.stages.capabilities import Capabilities, Constraint, OneOf
from cudnn_blocks.stages.constraints import UpTo
from cudnn_blocks.stages.cudnn_graph import CUDNN, declines_of, facts_of
from cudnn_blocks.stages.cudnn_graph import SERVED as CUDNN_SERVED
from cudnn_blocks.stages.gated_attention.evidence import CODES, EVIDENCE, SHOWN, TESTED
from cudnn_blocks.stages.kernel_stage import KernelChoice, KernelStage
from cudnn_blocks.stages.stage import REFERENCE
from cudnn_blocks.stages.toolchain import DslRequirement
from cudnn_blocks.target import GPU_TARGET_NAMES, Target
from cudnn_blocks.tensor_spec import TensorSpec
from cudnn_blocks.workspace import WorkspaceLayout

HOPPER, PORTABLE = "hopper", "portable"
MAX_SEQ_LEN = 2**28
MAX_TILES = 2**31 - 1
TILE_ROWS = 64
"""Query rows of the smallest tile of any kernel."""

_DTYPES: dict[str, Constraint] = {"dtype": OneOf(("bf16", "fp16", "e4m3"))}
_SERVED: dict[str, Constraint] = {
    **_DTYPES,
    "d_head": OneOf((64, 128, 256)),
    "seq_len": UpTo(MAX_SEQ_LEN),
    "tiles": UpTo(MAX_TILES),
}
_CUDNN_SERVED: dict[str, Constraint] = {
    **_SERVED,
    "dtype": OneOf(("bf16", "fp16")),
    "gate": OneOf((False,)),
    "seq_lens": OneOf((False,)),
    "window": OneOf(("none", "left of a causal diagonal")),
    "rows_without_keys": OneOf((False,)),
    **CUDNN_SERVED,
}
_DSL = DslRequirement((4, 8, 1))
_KERNELS = {
    (HOPPER, False): "cudnn_blocks.stages.attention.hopper.SdpaKernel",
    (HOPPER, True): "cudnn_blocks.stages.attention.hopper_fp8.SdpaFp8Kernel",
    (PORTABLE, False): "cudnn_blocks.stages.attention.portable.SdpaPortableKernel",
    (PORTABLE, True): "cudnn_blocks.stages.attention.portable_fp8.SdpaFp8PortableKernel",
}
"""By engine, and whether operands are e4m3 codes."""


@dataclass(frozen=True)
class SdpaModes(SdpaFacts):
    """Compile-time facts, the mask as the geometry has it."""

    @classmethod
    def of(
        cls,
        geometry: SdpaGeometry | GatedAttentionGeometry,
        dtype: str,
        *,
        has_gate: bool,
        has_lse: bool,
        has_seq_lens: bool,
        has_o_codes: bool = False,
    ) -> SdpaModes:
        """The facts of a geometry, and which optional operands take part."""
        return cls(
            dtype=dtype,
            h_q=geometry.h_q,
            h_kv=geometry.h_kv,
            d_head=geometry.d_head,
            is_causal=geometry.is_causal,
            causal_bottom_right=geometry.causal_bottom_right,
            window_left=geometry.window_left,
            window_right=geometry.window_right,
            has_gate=has_gate,
            has_lse=has_lse,
            has_seq_lens=has_seq_lens,
            has_o_codes=has_o_codes,
        )

    @property
    def window(self) -> str:
        """What kind of window there is."""
        if self.window_right > 0:
            return "right of the diagonal"
        if self.window_left < 0:
            return "none"
        return "left of a causal diagonal" if self.is_causal else "without a causal diagonal"

    def may_hide_all(self, num_rows: int, num_keys: int) -> bool:
        """True where some row may see no key."""
        has_bounds = self.causal_bottom_right or self.window_left >= 0
        return self.has_seq_lens or (has_bounds and num_rows > num_keys)


class SdpaStage(KernelStage):
    """One launch of attention; of e4m3 codes on Hopper two, the first of which transposes v.

    Operands: q ``[B, S, h_q, D]``, k and v ``[B, Sk, h_kv, D]``, o ``[B, S, h_q, D]``, gate
    ``[B, S, h_q, D]`` or None, lse FP32 ``[B, h_q, S]`` or None, seq_lens int32 ``[B]`` or None;
    with e4m3 codes also the booked scratch, uint8, or None where there is none. B, S and Sk are at
    least 1. The cuDNN engine takes the samples' extents and strides alone.

    ``scale``, ``descale_v`` and ``scale_o`` are read at every launch, and may be set between them.

    Args:
        modes: compile-time facts.
        scale: factor of the scores; an argument of the kernel, not compiled in. Of codes, times
            what the codes of q and k are scaled by.
        samples: of q, k, v and o: the largest extents, and where they are.
        target: what to compile for.
        engine: pin.
        descale_v: what codes of v are multiplied by.
        scale_o: what the result is multiplied by before it becomes codes.
    """

    name = "sdpa"
    rows = (
        *(
            Capabilities(engine, OneOf(targets), _SERVED, _DSL, EVIDENCE, SHOWN, codes)
            for engine, targets, codes in (
                (HOPPER, ("sm_90a",), CODES),
                (PORTABLE, GPU_TARGET_NAMES, TESTED),
            )
        ),
        Capabilities(
            engine=CUDNN,
            targets=OneOf(GPU_TARGET_NAMES),
            serves=_CUDNN_SERVED,
            evidence=EVIDENCE,
        ),
        Capabilities(
            engine=REFERENCE,
            targets=OneOf(("cpu",)),
            serves=_DTYPES,
            evidence={"cpu": "tests/unit/test_sdpa_reference.py"},
        ),
    )

    def __init__(
        self,
        modes: SdpaModes,
        scale: float,
        samples: Sequence[TensorSpec],
        target: Target,
        engine: str | None = None,
        *,
        descale_v: float = 1.0,
        scale_o: float = 1.0,
    ) -> None:
        q, k, _, _ = samples
        batch, num_rows = q.shape[:2]
        num_keys = k.shape[1]
        facts = {
            "dtype": modes.dtype,
            "d_head": modes.d_head,
            "seq_len": max(num_rows, num_keys),
            "tiles": batch * modes.h_q * -(-num_rows // TILE_ROWS),
            "gate": modes.has_gate,
            "seq_lens": modes.has_seq_lens,
            "window": modes.window,
            "rows_without_keys": modes.may_hide_all(num_rows, num_keys),
            **facts_of(q.device),
        }
        super().__init__(facts, target, engine)
        self.modes = modes
        self.scale = scale
        self.descale_v = descale_v
        self.scale_o = scale_o
        self.samples = tuple(samples)
        self._plan: Any = None

    def check(self) -> None:
        """Chooses the engine; builds the plan of a cuDNN one, so that nothing is left open."""
        super().check()
        if self.engine == CUDNN:
            from cudnn_blocks.stages.attention.cudnn import CudnnSdpa

            device: Any = self.facts["device"]
            with declines_of(self):
                self._plan = CudnnSdpa.build(self.modes, self.scale, self.samples, device)

    def check_extents(self, batch: int, num_rows: int, num_keys: int) -> None:
        """NotServedError where the engine has no plan for smaller extents than the samples'."""
        q, k, _, _ = self.samples
        if self.engine == CUDNN and (batch, num_rows, num_keys) != (*q.shape[:2], k.shape[1]):
            got = f"B={batch}, S={num_rows}, Sk={num_keys} with engine {CUDNN}"
            served = f"B={q.shape[0]}, S={q.shape[1]}, Sk={k.shape[1]}, the samples'"
            raise NotServedError(self.name, got, served)

    def compile(self) -> None:
        """Compiles the kernel; a cuDNN engine has its plan already."""
        if self.engine != CUDNN:
            super().compile()

    def launch(self, operands: Sequence[Any], stream: int) -> None:
        """One launch."""
        if self.engine == CUDNN:
            self._plan.launch(operands, stream)
        else:
            super().launch(operands, stream)

    def smem_bytes(self) -> int:
        """Shared memory of one CTA; 0 for cuDNN, which does not say."""
        return 0 if self.engine == CUDNN else super().smem_bytes()

    def book(self, layout: WorkspaceLayout) -> None:
        """The transposed v of e4m3 codes on Hopper."""
        if self.modes.is_fp8 and self.engine == HOPPER:
            k = self.samples[1]
            layout.book_scratch(self._hopper_config().scratch_bytes(k.shape[0], k.shape[1]))

    def _hopper_config(self) -> hopper_config.SdpaConfig:
        modes = dataclasses.asdict(self.modes)
        return hopper_config.SdpaConfig.from_geometry(self.target, **modes)

    def _choose_kernel(self) -> KernelChoice:
        kernel = _KERNELS[self.engine, self.modes.is_fp8]
        if self.engine == HOPPER:
            hopper = self._hopper_config()
            return KernelChoice(kernel, hopper, hopper_config.smem_bytes(hopper))
        modes = dataclasses.asdict(self.modes)
        portable = portable_config.SdpaPortableConfig.from_geometry(self.target, **modes)
        return KernelChoice(kernel, portable, portable_config.smem_bytes(portable))

    def _kernel_operands(self, operands: Sequence[Any]) -> Sequence[Any]:
        if self.modes.is_fp8:
            return *operands, self.scale, self.descale_v, self.scale_o
        return *operands, self.scale

    def run_reference(self, operands: Sequence[Any]) -> None:
        """Runs in torch."""
        modes = self.modes
        mask = AttentionMask(
            modes.is_causal, modes.causal_bottom_right, modes.window_left, modes.window_right
        )
        q, k, v, o, gate, lse, seq_lens, *_ = operands
        scales = (self.scale, mask, self.descale_v, self.scale_o)
        sdpa(q, k, v, o, gate, lse, seq_lens, *scales)

    def describe(self) -> str:
        """Sizes and modes that are compiled in, and the kernel's tile."""
        modes = self.modes
        parts = [modes.dtype, f"heads {modes.h_q}/{modes.h_kv}", f"D={modes.d_head}", self._mask()]
        parts += [
            field.name.removeprefix("has_")
            for field in dataclasses.fields(modes)
            if field.name.startswith("has_") and getattr(modes, field.name)
        ]
        if self.engine == REFERENCE:
            parts.append("allocates")
        elif self.engine == CUDNN:
            parts.append(str(self._plan))
        else:
            config: Any = self._choose_kernel().config
            parts.append(f"{config.tile.n} keys a step, {config.tile.num_stages} stages")
            if modes.is_fp8 and self.engine == HOPPER:
                parts.append("v transposed by a launch before")
        return ", ".join(parts)

    def _mask(self) -> str:
        modes = self.modes
        kind = "causal" if modes.is_causal else "full"
        if modes.causal_bottom_right:
            kind += " bottom-right"
        windows = {"left": modes.window_left, "right": modes.window_right}
        return " ".join([kind, *(f"{side} {n}" for side, n in windows.items() if n >= 0)])
