# SPDX-License-Identifier: Apache-2.0
"""Builders of the fused projection weight ``W_qkvg``, rows in bands ``Q | GATE | K | V``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cudnn_blocks.errors import ContractError
from cudnn_blocks.geometry.gated_attention import GatedAttentionGeometry

FLAT, PER_HEAD = "flat", "per_head"


class QkvgWeights(NamedTuple):
    """What the gated attention block takes of a layer's projections and norms."""

    w_qkvg: torch.Tensor
    """``[n_qkvg, d_model]``."""
    w_q_norm: torch.Tensor
    """``[d_head]``, a plain factor."""
    w_k_norm: torch.Tensor
    """``[d_head]``, a plain factor."""


def build_fused_qkvg_weight(
    w_q_gate: torch.Tensor,
    w_k: torch.Tensor,
    w_v: torch.Tensor,
    geometry: GatedAttentionGeometry,
    *,
    q_gate_layout: str,
) -> torch.Tensor:
    """Stacks projection matrices into ``W_qkvg``: rows ``Q | GATE | K | V``, head-major.

    Args:
        w_q_gate: ``[2 * h_q * d_head, d_model]``, the query and the gate projection in one matrix.
        w_k: ``[h_kv * d_head, d_model]``.
        w_v: ``[h_kv * d_head, d_model]``.
        geometry: sizes.
        q_gate_layout: ``"flat"`` for all query rows, then all gate rows; ``"per_head"`` for the
            query rows of head 0, its gate rows, the query rows of head 1 and so on. There is no
            default, since the wrong one gives a plausible weight.

    Returns:
        ``[n_qkvg, d_model]``, contiguous, new; values move bit for bit.

    Raises:
        ContractError: a shape, dtype or device that does not fit, or an unknown layout.
    """
    if q_gate_layout not in (FLAT, PER_HEAD):
        raise ContractError("q_gate_layout", f'"{FLAT}" or "{PER_HEAD}"', repr(q_gate_layout))
    return _stack({"w_q_gate": w_q_gate, "w_k": w_k, "w_v": w_v}, geometry, q_gate_layout)


def qkvg_from_hf(
    q_proj: torch.Tensor,
    k_proj: torch.Tensor,
    v_proj: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    geometry: GatedAttentionGeometry,
) -> QkvgWeights:
    """The block's weights from those of a Qwen3-Next-style attention layer of Hugging Face.

    ``q_proj`` interleaves query and gate per head there, and the norm weights are zero-centred: the
    layer multiplies by ``1 + w``. The sum is taken in FP32 and rounded once to the dtype of
    ``q_proj``, where the layer itself keeps it in FP32.

    Args:
        q_proj: ``q_proj.weight`` ``[2 * h_q * d_head, d_model]``.
        k_proj: ``k_proj.weight`` ``[h_kv * d_head, d_model]``.
        v_proj: ``v_proj.weight`` ``[h_kv * d_head, d_model]``.
        q_norm: ``q_norm.weight`` ``[d_head]``.
        k_norm: ``k_norm.weight`` ``[d_head]``.
        geometry: sizes.

    Returns:
        ``w_qkvg``, ``w_q_norm`` and ``w_k_norm``, new tensors. ``o_proj.weight`` is ``w_o`` as it
        stands.

    Both builders are differentiable: outside ``torch.no_grad()``, weights that require grad give
    one that does, which the block refuses while grad mode is on.

    Raises:
        ContractError: a shape, dtype or device that does not fit.
    """
    weights = {"q_proj": q_proj, "k_proj": k_proj, "v_proj": v_proj}
    w_qkvg = _stack(weights, geometry, PER_HEAD)
    folded = []
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        _check_shape(name, weight, (geometry.d_head,))
        folded.append((1.0 + weight.float()).to(q_proj))
    return QkvgWeights(w_qkvg, *folded)


def _stack(
    weights: dict[str, torch.Tensor], geometry: GatedAttentionGeometry, q_gate_layout: str
) -> torch.Tensor:
    """The bands of query with gate, key and value weights, in that order."""
    geometry.validate()
    q_width, _, kv_width, _ = geometry.qkvg_block_widths
    for (name, weight), rows in zip(
        weights.items(), (2 * q_width, kv_width, kv_width), strict=True
    ):
        _check_shape(name, weight, (rows, geometry.d_model))
    (first, w_q_gate), *others = weights.items()
    for name, weight in others:
        if weight.dtype != w_q_gate.dtype:
            raise ContractError(name, f"dtype {w_q_gate.dtype}, as {first}", weight.dtype)
        if weight.device != w_q_gate.device:
            raise ContractError(name, f"a tensor on {w_q_gate.device}, as {first}", weight.device)
    if q_gate_layout == PER_HEAD:
        heads = w_q_gate.reshape(geometry.h_q, 2, geometry.d_head, geometry.d_model)
        w_q_gate = heads.transpose(0, 1).reshape(2 * q_width, geometry.d_model)
    return torch.cat([w_q_gate, *(weight for _, weight in others)])


def _check_shape(name: str, weight: object, shape: tuple[int, ...]) -> None:
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(weight).__name__}")
    if tuple(weight.shape) != shape:
        raise ContractError(name, f"shape {list(shape)}", list(weight.shape))
