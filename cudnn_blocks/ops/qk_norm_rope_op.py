# SPDX-License-Identifier: Apache-2.0
"""QkNormRope and ``ops.qk_norm_rope``: QK-RMSNorm and partial RoPE in place."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from cudnn_blocks.api_base import Sample, require_type
from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.qk_norm_rope import QkNormRopeGeometry
from cudnn_blocks.norm_rope_operands import check_table_rows, norm_rope_operands
from cudnn_blocks.operands import (
    ACTIVATION_DTYPES,
    ANY_EXTENT,
    Extents,
    Operand,
    OperandTable,
    check_activation_dtype,
)
from cudnn_blocks.ops.library import check_traceable, is_eager, register
from cudnn_blocks.ops.seen_calls import SeenCallsOp
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.qk_norm_rope.stage import (
    MAX_BATCH_HEADS,
    QkNormRopeModes,
    QkNormRopeStage,
)
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.strided import vector_strides
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

_OP_NAME = "qk_norm_rope"


class QkNormRope(SeenCallsOp):
    """Per-head RMSNorm of Q and K, then rotate-half RoPE on their leading channels, in place.

    For every head ``x`` with ``R = rope_dim``, where channel ``i`` pairs with ``i + R / 2``::

        n(i) = x(i) * rsqrt(mean(x**2) + eps) * w(i)        x(i) itself without norm weights
        x(i) = n(i) * cos(i) - n(i + R/2) * sin(i)          i < R/2
        x(i) = n(i) * cos(i) + n(i - R/2) * sin(i)          R/2 <= i < R
        x(i) = n(i)                                         R <= i < D

    Rounding: all of it in FP32, then once to the dtype of x. Without norm weights the channels from
    R on are not touched. NaN and infinities stay in their own head.

    Operands are BF16 or FP16, all of one dtype, 16-byte aligned. B, S and the tables' rows T are
    dynamic, up to the samples' extents; B = 0 or S = 0 does nothing.

    Args:
        sample_q: ``[B, S, h_q, D]``, D a multiple of 8 up to 512; innermost stride 1, the others
            multiples of 8 that keep all elements apart. Q and K may be column bands of one slab.
        sample_k: ``[B, S, h_kv, D]``, strides as q.
        sample_w_q_norm: ``[D]``, contiguous, multiplied as it is; None for no norm.
        sample_w_k_norm: as ``sample_w_q_norm``; both or neither.
        sample_cos: ``[B, T, rope_dim]`` with T >= S and rope_dim even, 2 to D: row s is for token
            s, later ones are not read. Innermost stride 1, the others multiples of
            ``gcd(8, rope_dim / 2)``, 0 among them (one table for all). None for no rotation.
        sample_sin: as ``sample_cos``; both or neither.
        qk_norm_eps: added to the mean square.
        target: architecture name or Target; None for the device of the samples.
        engines: stage name to engine name, pins; the stage is ``qk_norm_rope``.

    Workspace: none.
    Streams: launches on ``current_stream``; None means torch's current stream of the operands'
    device. Never synchronises.
    Graphs: capturable after ``compile()``.
    Mutates: q, k.

    Raises:
        ContractError: a tensor breaks the contract, a table is shorter than S, there is neither
            norm nor rotation, or Q or K overlaps another operand.
        NotServedError: a size without a row; the message lists what is served.
        GradModeError: an operand requires grad while grad mode is on.

    Example:
        >>> plan = QkNormRope(q, k, w_q_norm, w_k_norm, cos, sin)
        >>> plan.compile()
        >>> plan.execute(q, k, w_q_norm, w_k_norm, cos, sin)

    Source: behaviour after the gated attention block of cudnn-frontend; no code taken.
    """

    op_name = "qk-norm-rope"

    def __init__(
        self,
        sample_q: Sample,
        sample_k: Sample,
        sample_w_q_norm: Sample | None = None,
        sample_w_k_norm: Sample | None = None,
        sample_cos: Sample | None = None,
        sample_sin: Sample | None = None,
        *,
        qk_norm_eps: float = 1e-6,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        require_type("qk_norm_eps", qk_norm_eps, float)
        samples = {
            "q": sample_q,
            "k": sample_k,
            "w_q_norm": sample_w_q_norm,
            "w_k_norm": sample_w_k_norm,
            "cos": sample_cos,
            "sin": sample_sin,
        }
        super().__init__(samples, None, target=target, engines=engines)
        self._eps = qk_norm_eps

    def execute(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        w_q_norm: torch.Tensor | None = None,
        w_k_norm: torch.Tensor | None = None,
        cos: torch.Tensor | None = None,
        sin: torch.Tensor | None = None,
        current_stream: StreamLike | None = None,
    ) -> None:
        """One pass over Q and K; see the class for every operand."""
        self._launch((q, k, w_q_norm, w_k_norm, cos, sin), current_stream)

    def _plan(self) -> None:
        self.geometry = self._read_geometry()
        super()._plan()

    def _read_geometry(self) -> QkNormRopeGeometry:
        specs = self._specs
        for name, other in (("w_k_norm", "w_q_norm"), ("sin", "cos")):
            if (name in specs) != (other in specs):
                missing, given = (other, name) if name in specs else (name, other)
                raise ContractError(missing, f"a tensor, since {given} is one", None)
        axes_of = {"q": "B, S, h_q, D", "k": "B, S, h_kv, D", "cos": "B, T, rope_dim"}
        for name, axes in axes_of.items():
            if name in specs and len(specs[name].shape) != axes.count(",") + 1:
                raise ContractError(name, f"shape [{axes}]", list(specs[name].shape))
        if "cos" in specs and specs["cos"].shape[-1] == 0:
            raise ContractError("cos", "rope_dim of at least 2, or None for no rotation", 0)
        return QkNormRopeGeometry(
            h_q=specs["q"].shape[2],
            h_kv=specs["k"].shape[2],
            d_head=specs["q"].shape[3],
            rope_dim=specs["cos"].shape[2] if "cos" in specs else 0,
            qk_norm="w_q_norm" in specs,
            qk_norm_eps=self._eps,
        )

    def _build_operands(self) -> OperandTable:
        geometry, dtype = self.geometry, self._specs["q"].dtype
        check_activation_dtype("q", dtype)

        def heads(name: str, count: int) -> Operand:
            strides = vector_strides(geometry.d_head, is_written=True)
            shape = ("B", "S", count, geometry.d_head)
            return Operand(name, dtype, shape, strides, is_mutated=True)

        return OperandTable(
            (
                heads("q", geometry.h_q),
                heads("k", geometry.h_kv),
                *norm_rope_operands(
                    dtype,
                    geometry.d_head,
                    geometry.rope_dim,
                    geometry.table_stride_multiple,
                    has_norm=geometry.qk_norm,
                    has_rope=geometry.rope_dim > 0,
                ),
            )
        )

    def _check_extents(self, extents: Extents) -> None:
        check_table_rows(extents)

    def _build_stages(
        self, target: Target, engines: Mapping[str, str]
    ) -> tuple[QkNormRopeStage, ...]:
        geometry = self.geometry
        modes = QkNormRopeModes(
            dtype=ACTIVATION_DTYPES[self._specs["q"].dtype],
            h_q=geometry.h_q,
            h_kv=geometry.h_kv,
            d_head=geometry.d_head,
            rope_dim=geometry.rope_dim,
            has_norm=geometry.qk_norm,
        )
        engine = engines.get(QkNormRopeStage.name)
        return (QkNormRopeStage(modes, self._eps, self._limits["S"], target, engine),)


def qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    w_q_norm: torch.Tensor | None = None,
    w_k_norm: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    qk_norm_eps: float = 1e-6,
    current_stream: StreamLike | None = None,
) -> None:
    """Per-head RMSNorm and RoPE of Q and K in place; as :class:`QkNormRope` has it.

    The first call of a device, dtype, heads, D, rope_dim, norm or none and eps plans; every B, S
    and stride after that finds the plan.

    Args:
        q: ``[B, S, h_q, D]``, mutated.
        k: ``[B, S, h_kv, D]``, mutated.
        w_q_norm: ``[D]``, or None for no norm.
        w_k_norm: as ``w_q_norm``.
        cos: ``[B, T, rope_dim]`` with T >= S, or None for no rotation.
        sin: as ``cos``.
        qk_norm_eps: added to the mean square.
        current_stream: stream to launch on; None for torch's current stream of q's device.

    Under ``torch.compile`` the op ``torch.ops.cudnn_blocks.qk_norm_rope`` stands for the call, with
    the mutations declared.
    """
    if is_eager(q):
        _run(q, k, w_q_norm, w_k_norm, cos, sin, qk_norm_eps, current_stream)
    else:
        check_traceable(_OP_NAME, "q", q, current_stream)
        _OVERLOAD(q, k, w_q_norm, w_k_norm, cos, sin, qk_norm_eps)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    w_q_norm: torch.Tensor | None = None,
    w_k_norm: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    qk_norm_eps: float = 1e-6,
    current_stream: StreamLike | None = None,
) -> None:
    operands = (q, k, w_q_norm, w_k_norm, cos, sin)
    _find_plan(operands, qk_norm_eps).execute(*operands, current_stream)


def _find_plan(operands: Sequence[torch.Tensor | None], eps: float) -> QkNormRope:
    """The plan that serves these operands at any B, S, T and strides."""
    names = ("q", "k", "w_q_norm", "w_k_norm", "cos", "sin")
    for name, tensor in zip(names, operands, strict=True):
        if tensor is not None or name in ("q", "k"):
            require_type(name, tensor, torch.Tensor)
    require_type("qk_norm_eps", eps, float)
    q, k, w_q_norm, w_k_norm, cos, sin = operands
    assert q is not None
    assert k is not None
    key: Hashable = (
        QkNormRope,
        q.get_device(),
        q.dtype,
        q.shape[2:],
        k.shape[2:],
        w_q_norm is None,
        w_k_norm is None,
        None if cos is None else cos.shape[2:],
        sin is None,
        eps,
    )

    def build() -> QkNormRope:
        plan = _build_unbounded(operands, eps)
        plan.compile()
        return plan

    plan: QkNormRope = PLANS.get(key, build)
    return plan


def _build_unbounded(operands: Sequence[torch.Tensor | None], eps: float) -> QkNormRope:
    """A plan for the largest extents; what is wrong with these operands, the samples show too."""
    q, k = operands[:2]
    assert q is not None
    assert k is not None
    num_heads = sum(x.shape[2] for x in (q, k) if x.dim() == 4)
    longest = MAX_BATCH_HEADS // max(num_heads, 1)

    def spec(tensor: torch.Tensor | None, *leading: int) -> TensorSpec | None:
        if tensor is None:
            return None
        shape = (*leading, *tensor.shape[len(leading) :])
        return TensorSpec.contiguous(shape, q.dtype, q.device)

    samples = [spec(tensor, ANY_EXTENT, longest) for tensor in (q, k)]
    samples += [spec(tensor) for tensor in operands[2:4]]
    samples += [spec(tensor, ANY_EXTENT, ANY_EXTENT) for tensor in operands[4:]]
    return QkNormRope(*samples, qk_norm_eps=eps, target=Target.of_device(q.device))  # type: ignore[arg-type]


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    w_q_norm: torch.Tensor | None = None,
    w_k_norm: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    qk_norm_eps: float = 1e-6,
) -> None:
    """Nothing is made."""


_OVERLOAD = register(
    f"{_OP_NAME}(Tensor(a!) q, Tensor(b!) k, Tensor? w_q_norm=None, Tensor? w_k_norm=None, "
    "Tensor? cos=None, Tensor? sin=None, float qk_norm_eps=1e-06) -> ()",
    _run,
    _fake,
)
