# SPDX-License-Identifier: Apache-2.0
"""The usual call of the gated attention block: few checks, one host call for all launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from cudnn_blocks.blocks.gated_attention_modes import O_REGION
from cudnn_blocks.blocks.gated_attention_operands import Presence
from cudnn_blocks.geometry import GatedAttentionGeometry
from cudnn_blocks.operands import ACTIVATION_DTYPES, Extents
from cudnn_blocks.stages.gated_attention.launcher_config import LauncherConfig, Step
from cudnn_blocks.stages.gemm.epilogues import NormRope
from cudnn_blocks.stages.kernel_cache import KERNELS, CompiledKernel, KernelBuild
from cudnn_blocks.stages.kernel_stage import KernelStage
from cudnn_blocks.stages.stage import Stage
from cudnn_blocks.target import Target
from cudnn_blocks.workspace import WorkspaceLayout

Operands = Sequence[torch.Tensor | None]
Range = tuple[int, int]
"""First byte address and the one past the last."""
KERNEL_ENGINES = frozenset({"portable", "hopper"})
"""Engines whose kernels can be launched by one host call."""
MAX_SEEN = 256
"""Calls that a plan remembers."""
_LAUNCHER = "cudnn_blocks.stages.gated_attention.launcher.GatedAttentionLauncher"
_ELEMENT_BYTES = 2
_INT32_BYTES = _FP32_BYTES = 4


def can_launch_at_once(stages: Sequence[Stage]) -> bool:
    """True where every stage is a kernel of this package, so that one host call serves them all."""
    return all(
        isinstance(stage, KernelStage) and stage.engine in KERNEL_ENGINES for stage in stages
    )


def compiled_launcher(
    stages: Sequence[KernelStage],
    geometry: GatedAttentionGeometry,
    presence: Presence,
    dtype: torch.dtype,
    target: Target,
    *,
    keep_cubin: bool = False,
) -> CompiledKernel:
    """The host function of the checked stages, for which ``can_launch_at_once`` holds.

    It holds every kernel. Compiled afresh where the cubin is asked for.
    """
    choices = {stage.name: stage._choose_kernel() for stage in stages}
    config = LauncherConfig(
        tuple(Step(slot, one.kernel, one.config) for slot, one in choices.items()),
        dtype=ACTIVATION_DTYPES[dtype],
        d_model=geometry.d_model,
        h_q=geometry.h_q,
        h_kv=geometry.h_kv,
        d_head=geometry.d_head,
        rope_dim=geometry.rope_dim,
        table_multiple=NormRope.table_multiple(geometry.rope_dim),
        has_norm=presence.has_norm,
        has_lse=presence.has_lse,
        has_seq_lens=presence.has_seq_lens,
    )
    build = KernelBuild(_LAUNCHER, config, target)
    return build(keep_cubin=True) if keep_cubin else KERNELS.get((config, target.name), build)


class OneCall:
    """All launches of a call behind one compiled host function.

    Args:
        call: of ``compiled_launcher``.
        geometry: scale and eps.
        layout: of the workspace.
    """

    def __init__(
        self,
        call: Callable[..., object] | None,
        geometry: GatedAttentionGeometry,
        layout: WorkspaceLayout,
    ) -> None:
        self._call = call
        self._scalars = (layout[O_REGION].offset_bytes, geometry.qk_norm_eps, geometry.scale)

    def launch(self, operands: Operands, workspace: torch.Tensor | None, stream: int) -> None:
        """Every launch of a checked call, on tensors whose strides are as the kernels need them."""
        self._call(*operands, workspace, *self._scalars, stream)  # type: ignore[misc]


class PlainCheck:
    """What the launcher of :class:`OneCall` leaves to check, for a call that is plainly right.

    The launcher checks dtypes, ranks, static extents and strides, equal B, S and T, multiples of
    pitches, alignment and that all devices are one, before anything is launched. What is left:
    presence, the limits of B, S and T, rows at one pitch, ``lse``, ``seq_lens`` and the workspace
    contiguous, its size, and memory that is written twice. A call that does not pass may still be
    legal; the full check decides. Calls that passed are remembered by addresses and layouts, the
    numbers that the answer depends on, never by their tensors.

    Args:
        geometry: sizes.
        presence: which optional operands a call has.
        limits: the largest B and S.
        workspace_bytes: of the plan.
        device_index: the GPU that the plan is bound to.
    """

    def __init__(
        self,
        geometry: GatedAttentionGeometry,
        presence: Presence,
        limits: Extents,
        workspace_bytes: int,
        device_index: int,
    ) -> None:
        self._presence = (
            presence.has_norm,
            presence.has_rope,
            presence.has_seq_lens,
            presence.has_lse,
        )
        self._seen: set[Hashable] = set()
        self._max_batch, self._max_tokens = limits["B"], limits["S"]
        self._workspace_bytes, self._device_index = workspace_bytes, device_index
        self._d_model, self._rope_dim, self._h_q = (
            geometry.d_model,
            geometry.rope_dim,
            geometry.h_q,
        )
        self._w_qkvg_bytes = geometry.n_qkvg * geometry.d_model * _ELEMENT_BYTES
        self._w_o_bytes = geometry.d_model * geometry.attn_width * _ELEMENT_BYTES
        self._norm_bytes = geometry.d_head * _ELEMENT_BYTES

    def passes(self, operands: Sequence[Any], workspace: Any) -> bool:
        """True only where the full check would agree and strides are as the kernels need them."""
        h, w_qkvg, w_q_norm, w_k_norm, cos, sin, w_o, out, seq_lens, lse = operands
        call = (
            h.data_ptr(),
            h.shape,
            h.stride(),
            h.get_device(),
            w_qkvg.data_ptr(),
            None if w_q_norm is None else w_q_norm.data_ptr(),
            None if w_k_norm is None else w_k_norm.data_ptr(),
            None if cos is None else (cos.data_ptr(), cos.shape, cos.stride()),
            None if sin is None else (sin.data_ptr(), sin.stride()),
            w_o.data_ptr(),
            out.data_ptr(),
            out.stride(),
            workspace.data_ptr(),
            workspace.numel(),
            workspace.stride(),
            workspace.dtype,
            None if seq_lens is None else (seq_lens.data_ptr(), seq_lens.stride()),
            None if lse is None else (lse.data_ptr(), lse.stride()),
        )
        if call in self._seen:
            return True
        if not self._is_plain(operands, workspace):
            return False
        if len(self._seen) >= MAX_SEEN:
            self._seen.clear()
        self._seen.add(call)
        return True

    def _is_plain(self, operands: Sequence[Any], workspace: Any) -> bool:
        h, w_qkvg, w_q_norm, w_k_norm, cos, sin, w_o, out, seq_lens, lse = operands
        given = (
            w_q_norm is not None and w_k_norm is not None,
            cos is not None and sin is not None,
            seq_lens is not None,
            lse is not None,
        )
        b, s, _ = h.shape
        if (
            given != self._presence
            or not (0 < b <= self._max_batch and 0 < s <= self._max_tokens)
            or h.get_device() != self._device_index
            or workspace.dtype is not torch.uint8  # the launcher takes int8 for it
            or workspace.numel() < self._workspace_bytes
            or not workspace.is_contiguous()
        ):
            return False
        h_range, out_range = self._rows(h, b, s), self._rows(out, b, s)
        if h_range is None or out_range is None:
            return False
        start = workspace.data_ptr()
        written = [out_range, (start, start + workspace.numel())]
        if lse is not None:
            if not lse.is_contiguous():
                return False
            start = lse.data_ptr()
            written.append((start, start + b * s * self._h_q * _FP32_BYTES))
        start, end = w_qkvg.data_ptr(), w_o.data_ptr()
        read = [h_range, (start, start + self._w_qkvg_bytes), (end, end + self._w_o_bytes)]
        if cos is not None:
            rows = cos.shape[1]
            if rows < s:
                return False
            read += [self._table(cos, b, rows), self._table(sin, b, rows)]
        if w_q_norm is not None:
            start, end = w_q_norm.data_ptr(), w_k_norm.data_ptr()
            read += [(start, start + self._norm_bytes), (end, end + self._norm_bytes)]
        if seq_lens is not None:
            if not seq_lens.is_contiguous():
                return False
            start = seq_lens.data_ptr()
            read.append((start, start + b * _INT32_BYTES))
        return are_apart(written, read)

    def _rows(self, x: Any, b: int, s: int) -> Range | None:
        """Bytes of ``[B, S, d_model]``; None where its rows are not at the pitch of axis 1."""
        step, pitch, _ = x.stride()
        if pitch < self._d_model or (b > 1 and step != s * pitch):
            return None
        start = x.data_ptr()
        return start, start + ((b * s - 1) * pitch + self._d_model) * _ELEMENT_BYTES

    def _table(self, table: Any, b: int, rows: int) -> Range:
        step, pitch, _ = table.stride()
        start = table.data_ptr()
        last = (b - 1) * step + (rows - 1) * pitch + self._rope_dim
        return start, start + last * _ELEMENT_BYTES


def are_apart(written: Sequence[Range], read: Sequence[Range]) -> bool:
    """True where no written byte range overlaps another range."""
    for i, (low, high) in enumerate(written):
        for other_low, other_high in read:
            if low < other_high and other_low < high:
                return False
        for other_low, other_high in written[:i]:
            if low < other_high and other_low < high:
                return False
    return True
