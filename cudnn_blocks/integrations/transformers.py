# SPDX-License-Identifier: Apache-2.0
"""transformers: Qwen3-Next's full-attention layers on the gated attention block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling

from cudnn_blocks import ops
from cudnn_blocks.blocks import GatedAttentionBlockFwd
from cudnn_blocks.errors import ContractError, NotServedError
from cudnn_blocks.geometry import GatedAttentionGeometry
from cudnn_blocks.integrations.calls import (
    DECLINES,
    Acceleration,
    CallCounts,
    ReplacedCall,
    accelerate,
    reason_of,
)
from cudnn_blocks.integrations.patching import TORCH, LayerRow
from cudnn_blocks.reference.gated_attention_weights import QkvgWeights, qkvg_from_hf
from cudnn_blocks.support import SupportReport
from cudnn_blocks.tensor_spec import TensorSpec

Result = tuple[torch.Tensor, torch.Tensor | None]
ORIGINAL = "Qwen3NextAttention.forward"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")
_SAMPLE_TOKENS = 128
"""Tokens of the samples that the engines are asked with; every call asks again for its own."""
SDPA, FLASH = "sdpa", "flash"
"""Attention backends of transformers for which no mask means a causal one, by name or in it."""
_UNREAD = frozenset({"position_ids", "use_cache"})
"""Arguments that say nothing about the result of a layer without a cache."""


class Knobs(NamedTuple):
    """Which fusions of the block run."""

    fuse_norm_rope: bool
    fuse_gate: bool

    def __str__(self) -> str:
        return ", ".join(name for name, is_on in self._asdict().items() if is_on)


KNOBS = (Knobs(True, True), Knobs(False, True), Knobs(True, False), Knobs(False, False))
"""In the order of preference; the first that is served runs."""


def accelerate_gated_attention(model: nn.Module) -> Acceleration:
    """Runs the full-attention layers of a Qwen3-Next model on ``GatedAttentionBlockFwd``.

    A prefill without a cache runs on the block: projections, QK norm, RoPE, attention, gate and
    output projection, with the tables that the model hands its layers. The projections are repacked
    once, beside the originals, which stay for every other call: one with a cache, an attention
    mask, an attention backend that is neither SDPA nor FlashAttention, packed sequences, autograd,
    autocast or ``torch.compile``. ``stats()`` counts those with the reason, ``explain()`` lists the
    layers that are never served. Weights that change are repacked at the next call.

    Args:
        model: a transformers model, or one layer, with ``Qwen3NextAttention`` layers in BF16 or
            FP16, in evaluation mode.

    Returns:
        The handle: ``explain()``, ``stats()``, ``restore()``.

    Raises:
        ImportError: transformers is not installed, or too old for this model.
        ContractError: a model of another family, in training mode, of another dtype, or with its
            parameters on several devices; the model is left as it was.
        LifecycleError: the model is accelerated already.

    Example:
        >>> acceleration = accelerate_gated_attention(model)
        >>> print(acceleration.explain())
        >>> logits = model(tokens, use_cache=False).logits

    Source: behaviour of ``Qwen3NextAttention`` of transformers 5.24 (Apache-2.0); no code taken.
    """
    return accelerate(model, _attention(), "Qwen3-Next full-attention", "forward", _Forward)


def _attention() -> type[nn.Module]:
    try:
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention
    except ImportError as error:
        raise ImportError(
            f"Qwen3-Next of transformers cannot be imported ({error}); "
            "install the extra: pip install 'cudnn_blocks[transformers]'"
        ) from error
    kind: type[nn.Module] = Qwen3NextAttention
    return kind


@dataclass(frozen=True)
class _Packed:
    """A layer as the block takes it."""

    geometry: GatedAttentionGeometry
    weights: QkvgWeights
    w_o: torch.Tensor
    knobs: Knobs
    report: SupportReport

    @classmethod
    def of(cls, layer: Any) -> _Packed:
        """Repacks a layer.

        Raises:
            NotServedError: a layer that the block does not compute, or that no engine serves.
            ContractError: weights of another shape or dtype.
        """
        _check_layer(layer)
        geometry = _geometry_of(layer)
        q, k, v = (getattr(layer, name).weight for name in PROJECTIONS[:3])
        q_norm, k_norm = (getattr(layer, name).weight for name in NORMS)
        with torch.no_grad():
            weights = qkvg_from_hf(q, k, v, q_norm, k_norm, geometry)
        w_o = layer.o_proj.weight.detach()
        knobs, report = _served_knobs(geometry, weights, w_o)
        return cls(geometry, weights, w_o, knobs, report)


class _Forward(ReplacedCall):
    """``Qwen3NextAttention.forward`` of one layer: its packed weights, and its own forward."""

    def __init__(self, layer: nn.Module, counts: CallCounts) -> None:
        self._layer: Any = layer
        self._original: Callable[..., Result] = layer.forward
        self._counts = counts
        self._pack()

    def _pack(self) -> None:
        """Repacks the weights as they are now."""
        self._state = _state_of(self._layer)
        self._packed: _Packed | None = None
        self._reason = ""
        try:
            self._packed = _Packed.of(self._layer)
        except (ContractError, NotServedError) as decline:
            self._reason = reason_of(decline)

    def row(self, name: str) -> LayerRow:
        """What runs the layer, for ``explain()``."""
        if self._packed is None:
            return LayerRow(name, ORIGINAL, TORCH, self._reason)
        engines = dict.fromkeys(str(stage.engine) for stage in self._packed.report.stages)
        runs = f"{GatedAttentionBlockFwd.__name__}({self._packed.knobs})"
        return LayerRow(name, runs, ", ".join(engines))

    def __call__(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Result:
        if is_compiling():
            return self._original(
                hidden_states, position_embeddings, attention_mask, *args, **kwargs
            )
        if _state_of(self._layer) != self._state:
            self._pack()
        reason = self._why_not(hidden_states, attention_mask, args, kwargs)
        if reason is None:
            try:
                out = self._run(hidden_states, *position_embeddings)
            except DECLINES as decline:
                reason = reason_of(decline)
            else:
                self._counts.accelerated += 1
                return out, None
        self._counts.original[reason] += 1
        return self._original(hidden_states, position_embeddings, attention_mask, *args, **kwargs)

    def _run(self, h: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        packed = self._packed
        assert packed is not None
        # One table for all entries is what transformers makes; the block takes a stride of 0.
        cos, sin = (table.expand(h.shape[0], -1, -1) for table in (cos, sin))
        out = ops.gated_attention(
            h,
            *packed.weights,
            cos,
            sin,
            packed.w_o,
            packed.geometry,
            fuse_norm_rope=packed.knobs.fuse_norm_rope,
            fuse_gate=packed.knobs.fuse_gate,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def _why_not(
        self,
        h: torch.Tensor,
        attention_mask: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str | None:
        """Why this call has to run on the original; None where the block may be asked."""
        if self._packed is None:
            return self._reason
        given = {"cache": args[0] if args else None, "attention_mask": attention_mask, **kwargs}
        for name, value in given.items():
            if name not in _UNREAD and value is not None and value is not False:
                return f"{name}: expected None"
        if self._layer.training:
            return "the layer is in training mode"
        if torch.is_grad_enabled():
            return "grad mode is on"
        if torch.is_autocast_enabled(h.device.type):
            return "autocast is on"
        backend = str(self._layer.config._attn_implementation)
        if backend != SDPA and FLASH not in backend:
            return f"attention backend {backend!r}: expected {SDPA} or a {FLASH} one"
        if backend != SDPA and _is_packed(kwargs.get("position_ids")):
            return "position_ids: expected one sequence an entry"
        return None


def _is_packed(position_ids: torch.Tensor | None) -> bool:
    """True where one row holds several sequences, which FlashAttention backends keep apart.

    It reads the positions, as those backends do in every layer; SDPA is given a mask instead.
    """
    if position_ids is None or position_ids.shape[0] != 1 or position_ids.shape[-1] < 2:
        return False
    return bool((position_ids.diff(dim=-1) != 1).any())


def _state_of(layer: Any) -> tuple[tuple[int, int], ...]:
    """Address and version of every parameter: another one where a weight changed or moved."""
    return tuple(
        (weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        for weight in layer.parameters()
    )


def _check_layer(layer: Any) -> None:
    """NotServedError for a layer that computes something else than the block."""
    for name in PROJECTIONS:
        linear = getattr(layer, name)
        if type(linear) is not nn.Linear:
            raise _not_served(f"{name} of type {type(linear).__name__}", "torch.nn.Linear")
        if linear.bias is not None:
            raise _not_served(f"{name} with a bias", "attention_bias=False")
    for name in (*PROJECTIONS, *NORMS):
        module = getattr(layer, name)
        if module._forward_hooks or module._forward_pre_hooks:
            raise _not_served(f"{name} with forward hooks", "modules without")
    if layer.q_norm.eps != layer.k_norm.eps:
        raise _not_served("q_norm and k_norm with two eps", "one eps")
    if not layer.is_causal:
        raise _not_served("is_causal=False", "causal attention")


def _not_served(missing: str, served: str) -> NotServedError:
    return NotServedError("Qwen3NextAttention", missing, served)


def _geometry_of(layer: Any) -> GatedAttentionGeometry:
    config, d_head = layer.config, layer.head_dim
    rotated = d_head * config.rope_parameters.get("partial_rotary_factor", 1.0)
    return GatedAttentionGeometry(
        d_model=layer.q_proj.in_features,
        h_q=layer.o_proj.in_features // d_head,
        h_kv=layer.k_proj.out_features // d_head,
        d_head=d_head,
        rope_dim=int(rotated),
        qk_norm_eps=layer.q_norm.eps,
        attn_scale=layer.scaling,
    )


def _served_knobs(
    geometry: GatedAttentionGeometry, weights: QkvgWeights, w_o: torch.Tensor
) -> tuple[Knobs, SupportReport]:
    """The best knobs that are served where the weights are; NotServedError if none are."""

    def spec(*shape: int) -> TensorSpec:
        return TensorSpec.contiguous(shape, w_o.dtype, w_o.device)

    rows = spec(1, _SAMPLE_TOKENS, geometry.d_model)
    table = spec(1, _SAMPLE_TOKENS, geometry.rope_dim)
    samples = (rows, *weights, table, table, w_o, rows)

    def plan(knobs: Knobs) -> GatedAttentionBlockFwd:
        norm_rope, gate = knobs
        return GatedAttentionBlockFwd(*samples, geometry, fuse_norm_rope=norm_rope, fuse_gate=gate)

    for knobs in KNOBS:
        report = plan(knobs).probe()
        if report.served:
            return knobs, report
    plan(KNOBS[-1]).check_support()
    raise AssertionError("served now and not before")
