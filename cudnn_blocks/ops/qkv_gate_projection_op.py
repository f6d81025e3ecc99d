# SPDX-License-Identifier: Apache-2.0
"""QkvGateProjection and ``ops.qkv_gate_projection``: the fused projection of gated attention."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from cudnn_blocks.api_base import Sample, require_type
from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry import GatedAttentionGeometry
from cudnn_blocks.norm_rope_operands import TABLE_ROWS, check_table_rows, norm_rope_operands
from cudnn_blocks.operands import (
    ACTIVATION_DTYPES,
    ANY_EXTENT,
    Contiguous,
    Extents,
    Operand,
    OperandTable,
    check_activation_dtype,
)
from cudnn_blocks.ops.allocate import run_on_stream
from cudnn_blocks.ops.library import check_traceable, is_eager, register
from cudnn_blocks.ops.seen_calls import SeenCallsOp
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.gemm.epilogues import NormRope
from cudnn_blocks.stages.gemm.stage import GemmModes, GemmStage
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.strided import PitchedRows
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

_OP_NAME = "qkv_gate_projection"
_SMALL = ("w_q_norm", "w_k_norm", "cos", "sin")
_FIELDS = ("d_model", "h_q", "h_kv", "d_head", "rope_dim", "qk_norm_eps", "qk_norm")
"""What the op needs of a geometry; the mask is not its business."""
PLAIN, FUSED = "qkv_gate_proj", "qkv_gate_proj_norm_rope"


class QkvGateProjection(SeenCallsOp):
    """The fused projection into the slab ``Q | GATE | K | V``, with or without QK-norm and RoPE.

    Without ``fuse_norm_rope`` ``proj[b, s, n] = A(sum over k of h[b, s, k] * w_qkvg[n, k])``. With
    it, GATE and V are that, and every head of Q and K is normalised and rotated before its one
    rounding, as :class:`QkNormRope` does with a rounded one.

    Rounding: FP32 sums, norm and rotation; one rounding to the activation dtype (``A``). Non-finite
    values stay in their row of h and, from the weight, in their head.

    Operands are BF16 or FP16, all of one dtype, 16-byte aligned. B, S and the tables' rows T are
    dynamic, up to the samples' extents (T: any from S on); B = 0 or S = 0 does nothing.

    Args:
        sample_h: ``[B, S, d_model]``; its B * S rows at one pitch, compact or a larger multiple
            of 8.
        sample_w_qkvg: ``[n_qkvg, d_model]``, contiguous.
        sample_proj: ``[B, S, n_qkvg]``; rows as those of h.
        geometry: sizes, norm and eps; its mask is not used.
        sample_w_q_norm: ``[d_head]``, contiguous; with ``fuse_norm_rope`` and ``qk_norm`` only.
        sample_w_k_norm: as ``sample_w_q_norm``.
        sample_cos: ``[B, T, rope_dim]`` with T >= S; innermost stride 1, the others even and
            multiples of ``gcd(8, rope_dim / 2)``, 0 among them. With ``fuse_norm_rope`` and a
            positive ``rope_dim`` only.
        sample_sin: as ``sample_cos``.
        fuse_norm_rope: norm and rotate Q and K in the epilogue.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``qkv_gate_proj``, or
            ``qkv_gate_proj_norm_rope`` with ``fuse_norm_rope``.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: proj.

    Raises:
        ContractError: a tensor breaks the contract, a table is shorter than S, or proj overlaps
            another operand.
        NotServedError: a size without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = QkvGateProjection(h, w_qkvg, proj, geometry)
        >>> plan.compile()
        >>> plan.execute(h, w_qkvg, proj)

    Source: behaviour after the gated attention block of cudnn-frontend; no code taken.
    """

    op_name = "qkv-gate-projection"

    def __init__(
        self,
        sample_h: Sample,
        sample_w_qkvg: Sample,
        sample_proj: Sample,
        geometry: GatedAttentionGeometry,
        *,
        sample_w_q_norm: Sample | None = None,
        sample_w_k_norm: Sample | None = None,
        sample_cos: Sample | None = None,
        sample_sin: Sample | None = None,
        fuse_norm_rope: bool = False,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        require_type("geometry", geometry, GatedAttentionGeometry)
        require_type("fuse_norm_rope", fuse_norm_rope, bool)
        samples = {
            "h": sample_h,
            "w_qkvg": sample_w_qkvg,
            "proj": sample_proj,
            "w_q_norm": sample_w_q_norm,
            "w_k_norm": sample_w_k_norm,
            "cos": sample_cos,
            "sin": sample_sin,
        }
        super().__init__(samples, geometry, target=target, engines=engines)
        self._fuse_norm_rope = fuse_norm_rope

    def execute(
        self,
        h: torch.Tensor,
        w_qkvg: torch.Tensor,
        proj: torch.Tensor,
        w_q_norm: torch.Tensor | None = None,
        w_k_norm: torch.Tensor | None = None,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
        current_stream: StreamLike | None = None,
    ) -> None:
        """One projection; see the class for every operand."""
        self._launch((h, w_qkvg, proj, w_q_norm, w_k_norm, cos, sin), current_stream)

    def _plan(self) -> None:
        super()._plan()
        if TABLE_ROWS in self._limits:
            self._limits[TABLE_ROWS] = ANY_EXTENT

    @property
    def _has_norm(self) -> bool:
        return self._fuse_norm_rope and self.geometry.qk_norm

    @property
    def _has_rope(self) -> bool:
        return self._fuse_norm_rope and self.geometry.rope_dim > 0

    def _build_operands(self) -> OperandTable:
        geometry, dtype = self.geometry, self._specs["h"].dtype
        check_activation_dtype("h", dtype)
        self._require_declared()
        d_model, n_qkvg, rows = geometry.d_model, geometry.n_qkvg, PitchedRows()
        multiple = NormRope.table_multiple(geometry.rope_dim)

        return OperandTable(
            (
                Operand("h", dtype, ("B", "S", d_model), rows),
                Operand("w_qkvg", dtype, (n_qkvg, d_model), Contiguous()),
                Operand("proj", dtype, ("B", "S", n_qkvg), rows, is_mutated=True),
                *norm_rope_operands(
                    dtype,
                    geometry.d_head,
                    geometry.rope_dim,
                    multiple,
                    has_norm=self._has_norm,
                    has_rope=self._has_rope,
                ),
            )
        )

    def _require_declared(self) -> None:
        """Samples of the small operands and the knobs have to agree."""
        wanted = (self._has_norm, self._has_norm, self._has_rope, self._has_rope)
        for name, is_wanted in zip(_SMALL, wanted, strict=True):
            if is_wanted and name not in self._specs:
                raise ContractError(name, "a sample, with fuse_norm_rope", None)
            if not is_wanted and name in self._specs:
                raise ContractError(name, "None, since the epilogue has no use for it", "a sample")

    def _check_extents(self, extents: Extents) -> None:
        check_table_rows(extents)

    def _build_stages(self, target: Target, engines: Mapping[str, str]) -> tuple[GemmStage, ...]:
        one, h = self.geometry, self._specs["h"]
        name, norm_rope = PLAIN, None
        if self._fuse_norm_rope:
            name = FUSED
            norm_rope = NormRope(one.d_head, one.h_q, one.h_kv, one.rope_dim, one.qk_norm)
        modes = GemmModes(one.n_qkvg, one.d_model, ACTIVATION_DTYPES[h.dtype], norm_rope)
        rows, pin = h.shape[0] * h.shape[1], engines.get(name)
        stage = GemmStage(name, modes, rows, target, pin, eps=one.qk_norm_eps, device=h.device)
        return (stage,)


def qkv_gate_projection(
    h: torch.Tensor,
    w_qkvg: torch.Tensor,
    geometry: GatedAttentionGeometry,
    w_q_norm: torch.Tensor | None = None,
    w_k_norm: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    fuse_norm_rope: bool = False,
    current_stream: StreamLike | None = None,
) -> torch.Tensor:
    """The slab ``Q | GATE | K | V``; as :class:`QkvGateProjection` has it.

    The shared plan cache is asked by device, dtype, geometry, B, S and the knob. A new B or S makes
    a new plan, which finds its kernel compiled unless it chooses another tile.

    Args:
        h: ``[B, S, d_model]``, BF16 or FP16.
        w_qkvg: ``[n_qkvg, d_model]``.
        geometry: sizes, norm and eps.
        w_q_norm: ``[d_head]``, with ``fuse_norm_rope`` and ``qk_norm`` only.
        w_k_norm: as ``w_q_norm``.
        cos: ``[B, T, rope_dim]`` with T >= S, with ``fuse_norm_rope`` and a rotation only.
        sin: as ``cos``.
        fuse_norm_rope: norm and rotate Q and K in the epilogue.
        current_stream: stream to launch on; None for torch's current stream of h's device.

    Returns:
        ``[B, S, n_qkvg]``, contiguous, new, allocated on the stream of the launch.

    Under ``torch.compile`` the op ``torch.ops.cudnn_blocks.qkv_gate_projection`` stands for the
    call.
    """
    require_type("geometry", geometry, GatedAttentionGeometry)
    require_type("fuse_norm_rope", fuse_norm_rope, bool)
    tensors = (h, w_qkvg, w_q_norm, w_k_norm, cos, sin)
    if is_eager(h):
        return _run(tensors, geometry, fuse_norm_rope, current_stream)
    check_traceable(_OP_NAME, "h", h, current_stream)
    sizes = (getattr(geometry, name) for name in _FIELDS)
    proj: torch.Tensor = _OVERLOAD(*tensors, *sizes, fuse_norm_rope)
    return proj


def _run(
    tensors: Sequence[torch.Tensor | None],
    geometry: GatedAttentionGeometry,
    fuse_norm_rope: bool,
    current_stream: StreamLike | None,
) -> torch.Tensor:
    plan = _find_plan(tensors, geometry, fuse_norm_rope)
    h, w_qkvg, w_q_norm, w_k_norm, cos, sin = tensors
    assert h is not None
    assert w_qkvg is not None

    def launch(stream: StreamLike | None) -> list[torch.Tensor]:
        proj = h.new_empty((*h.shape[:-1], geometry.n_qkvg))
        plan.execute(h, w_qkvg, proj, w_q_norm, w_k_norm, cos, sin, stream)
        return [proj]

    return run_on_stream(h, current_stream, launch)[0]


def _find_plan(
    tensors: Sequence[torch.Tensor | None], geometry: GatedAttentionGeometry, fuse_norm_rope: bool
) -> QkvGateProjection:
    for name, tensor in zip(("h", "w_qkvg", *_SMALL), tensors, strict=True):
        if tensor is not None or name in ("h", "w_qkvg"):
            require_type(name, tensor, torch.Tensor)
    h, w_qkvg, *small = tensors
    assert h is not None
    assert w_qkvg is not None
    presence = tuple(tensor is None for tensor in small)
    device, knobs = h.get_device(), (geometry, presence, fuse_norm_rope)
    key: Hashable = (QkvGateProjection, device, h.dtype, h.shape, *knobs)

    def build() -> QkvGateProjection:
        proj = TensorSpec.contiguous((*h.shape[:-1], geometry.n_qkvg), h.dtype, h.device)
        samples: dict[str, Any] = {
            f"sample_{name}": of for name, of in zip(_SMALL, small, strict=True)
        }
        plan = QkvGateProjection(
            h, w_qkvg, proj, geometry, **samples, fuse_norm_rope=fuse_norm_rope
        )
        plan.compile()
        return plan

    plan: QkvGateProjection = PLANS.get(key, build)
    return plan


def _library_op(*arguments: Any) -> torch.Tensor:
    tensors, (*sizes, fuse_norm_rope) = arguments[:6], arguments[6:]
    return _run(tensors, _geometry_of(sizes), fuse_norm_rope, None)


def _library_fake(*arguments: Any) -> torch.Tensor:
    h: torch.Tensor = arguments[0]
    return h.new_empty((*h.shape[:-1], _geometry_of(arguments[6:-1]).n_qkvg))


def _geometry_of(sizes: Sequence[Any]) -> GatedAttentionGeometry:
    return GatedAttentionGeometry(**dict(zip(_FIELDS, sizes, strict=True)))


_OVERLOAD = register(
    f"{_OP_NAME}(Tensor h, Tensor w_qkvg, Tensor? w_q_norm, Tensor? w_k_norm, Tensor? cos, "
    "Tensor? sin, int d_model, int h_q, int h_kv, int d_head, int rope_dim, float qk_norm_eps, "
    "bool qk_norm, bool fuse_norm_rope) -> Tensor",
    _library_op,
    _library_fake,
)
