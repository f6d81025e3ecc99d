# SPDX-License-Identifier: Apache-2.0
"""``ops.sdpa_fwd``: cached attention plans behind a function, and its torch.library entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cudnn_blocks.api_base import require_type
from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.sdpa import SdpaGeometry
from cudnn_blocks.operands import check_activation_dtype
from cudnn_blocks.ops.allocate import run_on_stream
from cudnn_blocks.ops.library import (
    bind_arguments,
    check_traceable,
    defaults_of,
    is_eager,
    register,
)
from cudnn_blocks.ops.sdpa_op import SdpaFwd
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

_OP_NAME = "sdpa_fwd"


def sdpa_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    *,
    attn_scale: float | None = None,
    is_causal: bool = True,
    causal_bottom_right: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    return_lse: bool = False,
    current_stream: StreamLike | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention; operands, rounding and errors are those of :class:`SdpaFwd`.

    The shared plan cache is asked by device, dtype, heads, D, mask, which operands are given, and
    B, S and Sk rounded up to powers of 2. A new plan finds its kernel compiled.

    Args:
        q: ``[B, S, h_q, D]``.
        k: ``[B, Sk, h_kv, D]``.
        v: shape of k.
        gate: shape of q, or None.
        seq_lens: int32 ``[B]``, keys of each entry, or None.
        attn_scale: factor of the scores; None for ``D ** -0.5``.
        is_causal: a row sees no key past its diagonal.
        causal_bottom_right: the diagonal ends in the last key.
        window_left: keys shown left of the diagonal; -1 for all.
        window_right: keys shown right of a causal diagonal.
        return_lse: also return the log-sum-exp of the scaled scores.
        current_stream: stream to launch on; None for torch's current stream of q's device.

    Returns:
        Shape of q, contiguous, new; with ``return_lse`` also FP32 ``[B, h_q, S]``. Allocated on the
        stream of the launch.

    Under ``torch.compile`` the op ``torch.ops.cudnn_blocks.sdpa_fwd`` stands for the call.
    """
    mask = (attn_scale, is_causal, causal_bottom_right, window_left, window_right)
    require_type("return_lse", return_lse, bool)
    if is_eager(q):
        results = _run((q, k, v, gate, seq_lens), mask, return_lse, current_stream)
    else:
        check_traceable(_OP_NAME, "q", q, current_stream)
        results = _OVERLOAD(q, k, v, gate, seq_lens, *mask, return_lse)
    return (results[0], results[1]) if return_lse else results[0]


def _run(
    operands: Sequence[Any],
    mask: tuple[Any, ...],
    return_lse: bool,
    current_stream: StreamLike | None,
) -> list[torch.Tensor]:
    for name, tensor in zip(("q", "k", "v", "gate", "seq_lens"), operands, strict=True):
        if tensor is not None or name in ("q", "k", "v"):
            require_type(name, tensor, torch.Tensor)
    q, k, v, gate, seq_lens = operands
    check_activation_dtype("q", q.dtype)  # codes have scales: they are SdpaFwd's
    modes = (gate is not None, seq_lens is not None, return_lse)
    q_shape, k_shape = (_rounded_up(x.shape) for x in (q, k))
    key = (SdpaFwd, q.get_device(), q.dtype, q_shape, k_shape, mask, modes)

    def build() -> SdpaFwd:
        plan = _build(q, q_shape, k_shape, mask, modes)
        plan.compile()
        return plan

    plan: SdpaFwd = PLANS.get(key, build)

    def launch(stream: StreamLike | None) -> list[torch.Tensor]:
        results = _new_results(q, return_lse)
        lse = results[1] if return_lse else None
        plan.execute(q, k, v, results[0], gate, lse, seq_lens, stream)
        return results

    return run_on_stream(q, current_stream, launch)


def _rounded_up(shape: Sequence[int]) -> tuple[int, ...]:
    """Batch and length rounded up to powers of 2, 0 to 1."""
    return tuple(1 << max(n - 1, 0).bit_length() if i < 2 else n for i, n in enumerate(shape))


def _build(
    q: torch.Tensor,
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    mask: tuple[Any, ...],
    modes: tuple[bool, bool, bool],
) -> SdpaFwd:
    """A plan for these extents; it serves every stride, so the samples' are compact."""
    for name, shape in (("q", q_shape), ("k", k_shape)):
        if len(shape) != 4:
            raise ContractError(name, "shape [batch, length, heads, D]", list(shape))
    is_gated, is_bounded, return_lse = modes
    sample_q, sample_k = (TensorSpec.contiguous(x, q.dtype, q.device) for x in (q_shape, k_shape))
    return SdpaFwd(
        sample_q,
        sample_k,
        sample_k,
        sample_q,
        SdpaGeometry(q_shape[2], k_shape[2], q_shape[3], *mask),
        sample_gate=sample_q if is_gated else None,
        return_lse=return_lse,
        seq_lens_present=is_bounded,
        target=Target.of_device(q.device),
    )


def _new_results(q: torch.Tensor, return_lse: bool) -> list[torch.Tensor]:
    results = [q.new_empty(q.shape)]
    if return_lse:
        results.append(q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32))
    return results


def _split(
    arguments: Sequence[Any], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...], bool]:
    """Operands, mask and return_lse; the dispatcher leaves out trailing defaults."""
    values = list(bind_arguments(_DEFAULTS, arguments, named).values())
    return tuple(values[:5]), tuple(values[5:-1]), values[-1]


def _library_op(*arguments: Any, **named: Any) -> list[torch.Tensor]:
    return _run(*_split(arguments, named), None)


def _library_fake(*arguments: Any, **named: Any) -> list[torch.Tensor]:
    operands, _, return_lse = _split(arguments, named)
    return _new_results(operands[0], return_lse)


_OVERLOAD = register(
    f"{_OP_NAME}(Tensor q, Tensor k, Tensor v, Tensor? gate=None, Tensor? seq_lens=None, "
    "float? attn_scale=None, bool is_causal=True, bool causal_bottom_right=False, "
    "int window_left=-1, int window_right=-1, bool return_lse=False) -> Tensor[]",
    _library_op,
    _library_fake,
)
_DEFAULTS = defaults_of(_OVERLOAD)
