# SPDX-License-Identifier: Apache-2.0
"""GatedAttentionBlockFwd: projection, norm + RoPE, attention, gate and out projection as a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from cudnn_blocks.api_base import APIBase, Sample, needs_grad, require_type
from cudnn_blocks.blocks.gated_attention_launch import (
    OneCall,
    PlainCheck,
    can_launch_at_once,
    compiled_launcher,
)
from cudnn_blocks.blocks.gated_attention_modes import mode_of
from cudnn_blocks.blocks.gated_attention_operands import (
    Presence,
    check_h_blob,
    check_samples_fit,
    operand_table,
    with_rows_at_one_pitch,
)
from cudnn_blocks.blocks.gated_attention_precision import (
    BLOBS,
    Quant,
    check_replaces,
    check_sizes,
    formats_of,
    precision_of,
    set_scalars,
)
from cudnn_blocks.blocks.gated_attention_stages import Wiring
from cudnn_blocks.errors import ContractError, NotServedError
from cudnn_blocks.geometry import GatedAttentionGeometry
from cudnn_blocks.norm_rope_operands import TABLE_ROWS, check_table_rows
from cudnn_blocks.operands import ANY_EXTENT, Extents, OperandTable
from cudnn_blocks.quant_spec import MxQuantSpec, QuantSpec
from cudnn_blocks.stages.kernel_stage import KernelStage
from cudnn_blocks.stages.stage import Stage
from cudnn_blocks.stream import StreamLike, ambient_stream, resolve_stream
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec
from cudnn_blocks.workspace import WorkspaceLayout

Operands = Sequence[torch.Tensor | None]
_H, _OUT = 0, 7
"""Places of ``h`` and ``out`` among the operands."""


class GatedAttentionBlockFwd(APIBase):
    """A gated attention layer: ``out = W_o (A(SDPA(Q, K, V)) * sigmoid(GATE))``.

    With ``A`` the rounding to the activation dtype, per batch entry, token and head::

        Q | GATE | K | V = A(h W_qkvg^T)
        Q, K             = A(RoPE(RMSNorm(Q), RMSNorm(K)))
        O                = A(softmax(scale * Q K^T over the visible keys) V)
        out              = A(A(O * sigmoid(GATE)) W_o^T)

    Rounding: sums in FP32; ``A`` where it stands above. ``fuse_norm_rope`` takes norm and rotation
    of the unrounded projection, ``fuse_gate`` changes no bit. A row that sees no key is exactly 0
    before and after the gate, with LSE = -inf. docs/gated_attention.md has every detail, and the
    rounding points of ``quant``.

    Operands are BF16 or FP16, or codes with ``quant``; 16-byte aligned. B and S are dynamic: a plan
    takes them up to its samples' extents; 0 is an empty result.

    Args:
        sample_h: ``[B, S, d_model]``, rows at one pitch, a multiple of 8.
        sample_w_qkvg: ``[n_qkvg, d_model]``, contiguous, row bands ``Q | GATE | K | V``; made by
            ``build_fused_qkvg_weight`` or ``qkvg_from_hf``.
        sample_w_q_norm: ``[d_head]``, contiguous; None where the geometry's ``qk_norm`` is False.
        sample_w_k_norm: as ``sample_w_q_norm``.
        sample_cos: ``[B, T, rope_dim]`` with T >= S, row s for token s; innermost stride 1, the
            others even and multiples of ``gcd(8, rope_dim / 2)``, 0 among them (one table for all
            entries). None where rope_dim is 0.
        sample_sin: as ``sample_cos``.
        sample_w_o: ``[d_model, h_q * d_head]``, contiguous.
        sample_out: shape and strides as h may have them.
        geometry: sizes, norm and mask.
        return_lse: declares ``lse``, FP32 ``[B, h_q, S]``: natural log, of scaled scores.
        save_for_backward: not served in this version.
        seq_lens_present: declares ``seq_lens``, int32 ``[B]``: keys of each entry, clamped to 0 to
            S. It bounds keys only.
        inplace_qkv: None or True: Q and K are normalised in their slab. False is not served.
        fuse_norm_rope: norm and rotation in the epilogue of the projection.
        fuse_gate: gate in the epilogue of the attention.
        quant: ``QuantSpec`` for per-tensor FP8, ``MxQuantSpec`` for block-scaled operands; None for
            BF16 and FP16. ``h`` and the weights are then codes, everything else BF16, and both
            fusion knobs are on or neither.
        sample_h_sf: scale blob of ``h``, flat, with ``MxQuantSpec``.
        sample_w_qkvg_sf: scale blob of ``w_qkvg``, flat, with ``MxQuantSpec``.
        sample_w_o_sf: scale blob of ``w_o``, flat, with ``MxQuantSpec(o_fp4=...)``.
        engines: stage name to engine name, pins. Stages are ``qkv_gate_proj`` or
            ``qkv_gate_proj_norm_rope``, ``qk_norm_rope``, ``sdpa``, ``sigmoid_gate``, ``out_proj``,
            and with ``quant`` some that start with ``quantize_``.
        target: architecture name or Target; None for the device of the samples.

    Workspace: the regions of the mode and what an engine needs, ``get_workspace_size()`` bytes,
    256-byte aligned; contents are undefined between calls.
    Streams: every stage launches on ``current_stream``; None means torch's current stream of the
    operands' device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: out, lse, workspace.

    Raises:
        ContractError: a tensor or a scale breaks the contract, tables are shorter than S, or
            written memory overlaps another operand.
        NotServedError: what no engine serves, naming the stage and what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> geometry = GatedAttentionGeometry(2048, h_q=16, h_kv=2, d_head=256, rope_dim=64)
        >>> block = GatedAttentionBlockFwd(h, w_qkvg, w_q, w_k, cos, sin, w_o, out, geometry)
        >>> block.compile()
        >>> workspace = torch.empty(block.get_workspace_size(), dtype=torch.uint8, device="cuda")
        >>> block.execute(h, w_qkvg, w_q, w_k, cos, sin, w_o, out, workspace)

    Source: behaviour after ``GatedAttentionBlockFwd`` of cudnn-frontend and the attention layer of
    Qwen3-Next in transformers; no code taken.
    """

    op_name = "gated-attention-block"

    def __init__(
        self,
        sample_h: Sample,
        sample_w_qkvg: Sample,
        sample_w_q_norm: Sample | None,
        sample_w_k_norm: Sample | None,
        sample_cos: Sample | None,
        sample_sin: Sample | None,
        sample_w_o: Sample,
        sample_out: Sample,
        geometry: GatedAttentionGeometry,
        *,
        return_lse: bool = False,
        save_for_backward: bool = False,
        seq_lens_present: bool = False,
        inplace_qkv: bool | None = None,
        fuse_norm_rope: bool = False,
        fuse_gate: bool = False,
        quant: Quant | None = None,
        sample_h_sf: Sample | None = None,
        sample_w_qkvg_sf: Sample | None = None,
        sample_w_o_sf: Sample | None = None,
        engines: Mapping[str, str] | None = None,
        target: str | Target | None = None,
    ) -> None:
        require_type("geometry", geometry, GatedAttentionGeometry)
        flags = {
            "return_lse": return_lse,
            "save_for_backward": save_for_backward,
            "seq_lens_present": seq_lens_present,
            "fuse_norm_rope": fuse_norm_rope,
            "fuse_gate": fuse_gate,
        }
        for name, value in flags.items():
            require_type(name, value, bool)
        if inplace_qkv is not None:
            require_type("inplace_qkv", inplace_qkv, bool)
        if quant is not None:
            require_type("quant", quant, QuantSpec, MxQuantSpec)
        samples = {
            "h": sample_h,
            "w_qkvg": sample_w_qkvg,
            "w_q_norm": sample_w_q_norm,
            "w_k_norm": sample_w_k_norm,
            "cos": sample_cos,
            "sin": sample_sin,
            "w_o": sample_w_o,
            "out": sample_out,
            "h_sf": sample_h_sf,
            "w_qkvg_sf": sample_w_qkvg_sf,
            "w_o_sf": sample_w_o_sf,
        }
        for name in ("h", "w_qkvg", "w_o", "out"):
            require_type(f"sample_{name}", samples[name], torch.Tensor, TensorSpec)
        super().__init__(samples, geometry, target=target, engines=engines)
        self._fusions = {"fuse_norm_rope": fuse_norm_rope, "fuse_gate": fuse_gate}
        self._presence = Presence(
            has_norm=geometry.qk_norm,
            has_rope=geometry.rope_dim > 0,
            has_seq_lens=seq_lens_present,
            has_lse=return_lse,
        )
        self._quant, self._precision = quant, precision_of(quant)
        self._one_call: OneCall | None = None
        self._plain: PlainCheck | None = None
        self._unserved = {
            "save_for_backward=True": save_for_backward,
            "inplace_qkv=False": inplace_qkv is False,
        }

    def execute(
        self,
        h: torch.Tensor,
        w_qkvg: torch.Tensor,
        w_q_norm: torch.Tensor | None,
        w_k_norm: torch.Tensor | None,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        w_o: torch.Tensor,
        out: torch.Tensor,
        workspace: torch.Tensor,
        seq_lens: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        saved: object | None = None,
        current_stream: StreamLike | None = None,
        h_sf: torch.Tensor | None = None,
        w_qkvg_sf: torch.Tensor | None = None,
        w_o_sf: torch.Tensor | None = None,
    ) -> None:
        """One forward pass; see the class for every operand."""
        if saved is not None:
            self._refuse({"saved": True})
        operands: tuple[torch.Tensor | None, ...]
        operands = (h, w_qkvg, w_q_norm, w_k_norm, cos, sin, w_o, out, seq_lens, lse)
        blobs = (h_sf, w_qkvg_sf, w_o_sf)
        if self._precision.is_block_scaled or any(blob is not None for blob in blobs):
            operands += self._blobs(blobs)
        if not self._launched_plainly(operands, workspace, current_stream):
            self._launch(operands, current_stream, workspace)

    def update_quant_scales(self, quant: Quant) -> None:
        """Takes the scales of another spec from the next call on; nothing is compiled.

        Captured graphs keep the scales that they were captured with.

        Raises:
            ContractError: a value outside the contract, or a spec of another mode.
        """
        require_type("quant", quant, QuantSpec, MxQuantSpec)
        with self._lock:
            check_replaces(self._quant, quant)
            self._quant = quant
            if self._supported:
                set_scalars(cast("tuple[Stage, ...]", self._stages), quant, self.geometry)

    def _blobs(self, given: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        """The scale blobs that the plan declares; ContractError for one that it does not."""
        declared = []
        for name, blob in zip(BLOBS, given, strict=True):
            if name in self._specs:
                declared.append(blob)
            elif blob is not None:
                raise ContractError(name, "None, since it was not declared", "a tensor")
        return tuple(declared)

    def _launched_plainly(
        self, operands: Operands, workspace: torch.Tensor, current_stream: StreamLike | None
    ) -> bool:
        """Launches a usual call with few checks; False where the full check has to decide."""
        one_call, plain, index = self._one_call, self._plain, self._device_index
        if one_call is None or plain is None or index is None:
            return False
        try:
            if not plain.passes(operands, workspace) or needs_grad(operands):
                return False
            stream = (
                ambient_stream(index)
                if current_stream is None
                else resolve_stream(current_stream, index)
            )
            one_call.launch(operands, workspace, stream)
        except Exception:  # the full check names what is wrong
            return False
        return True

    def _refuse(self, unserved: Mapping[str, bool]) -> None:
        for name, is_asked in unserved.items():
            if is_asked:
                raise NotServedError(self.op_name, name, "inference, without it")

    def _plan(self) -> None:
        self._refuse(self._unserved)
        if self._quant is not None:
            self._quant.validate()
        self._mode = mode_of(self._precision, **self._fusions)
        super()._plan()
        if self._presence.has_rope:
            self._limits[TABLE_ROWS] = ANY_EXTENT

    def _build_operands(self) -> OperandTable:
        check_samples_fit(self.geometry, self._specs, self._presence, self._precision)
        check_sizes(self._quant, self.geometry)
        self._formats = formats_of(self._quant, self._specs)
        facts = (self.geometry, self._formats, self._presence)
        self._wiring = Wiring(*facts, self._mode, self._quant)
        return operand_table(*facts)

    def _build_stages(self, target: Target, engines: Mapping[str, str]) -> tuple[Stage, ...]:
        return self._wiring.stages(self._specs, target, engines)

    def _book(self, layout: WorkspaceLayout) -> None:
        stages = cast("tuple[Stage, ...]", self._stages)
        if self._wiring.needs_compact_rows(stages):
            facts = (self.geometry, self._formats, self._presence)
            self._operands = operand_table(*facts, has_compact_rows=True)
            self._operands.check_samples(self._specs)
        self._wiring.book(layout, stages, self._limits["B"], self._limits["S"])

    def _compile_stages(self) -> None:
        stages = cast("tuple[Stage, ...]", self._stages)
        is_one_call = self._quant is None and can_launch_at_once(stages)
        if self.target.is_cpu or not is_one_call:
            super()._compile_stages()
            return
        facts = (self.geometry, self._presence)
        kernels = cast("tuple[KernelStage, ...]", stages)
        launcher = compiled_launcher(kernels, *facts, self._wiring.dtype, self.target)
        self._one_call = OneCall(launcher.call, self.geometry, self._layout)
        if self._device_index is not None:
            size_bytes = self._layout.size_bytes
            self._plain = PlainCheck(*facts, self._limits, size_bytes, self._device_index)

    def _check_extents(self, extents: Extents) -> None:
        check_table_rows(extents)
        check_h_blob(self.geometry, self._formats, extents)
        if not self._is_empty(extents):
            self._wiring.check_extents(cast("tuple[Stage, ...]", self._stages), extents)

    def _is_empty(self, extents: Extents) -> bool:
        return extents["B"] == 0 or extents["S"] == 0

    def _launch_stages(
        self, operands: Operands, workspace: torch.Tensor | None, stream: int
    ) -> None:
        if self._one_call is None:
            super()._launch_stages(operands, workspace, stream)
        else:
            self._one_call.launch(self._with_uniform_rows(operands), workspace, stream)

    def _stage_operands(
        self, operands: Operands, workspace: torch.Tensor | None
    ) -> Sequence[Sequence[Any]]:
        assert workspace is not None, "a call that is not empty has a workspace"
        names = [operand.name for operand in self._operands.operands]
        given = dict(zip(names, self._with_uniform_rows(operands), strict=True))
        return self._wiring.stage_operands(given, self._layout, workspace)

    def _with_uniform_rows(self, operands: Operands) -> list[torch.Tensor | None]:
        """The operands, ``h`` and ``out`` with the pitch of their rows as the stride of axis 1."""
        even = list(operands)
        for place in (_H, _OUT):
            even[place] = with_rows_at_one_pitch(operands[place])
        return even
