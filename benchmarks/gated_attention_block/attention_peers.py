# SPDX-License-Identifier: Apache-2.0
"""Other attentions, each by its own package, on ``[1, S, heads, D]``; absent ones raise.

A builder takes samples of q, k and v and the geometry; it returns what it is, and a function of the
three that allocates its result. Its first call compiles what has to be compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from cudnn_blocks import SdpaFwd

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gated_attention_block.chain import Attend
    from cudnn_blocks import SdpaGeometry

    Build = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SdpaGeometry], "Attention"]

FA4, FA3 = "fa4", "fa3"
CUDNN_FRONTEND, TORCH_CUDNN, TORCH_FLASH = "cudnn-frontend", "torch-cudnn", "torch-flash"
TORCH = "torch"
CUDNN_PEERS = frozenset({CUDNN_FRONTEND, TORCH_CUDNN})
"""The profiler has to show cuDNN's kernel in these."""


@dataclass(frozen=True)
class Attention:
    """A peer, ready to be called."""

    words: str
    attend: Attend


def flash_attention_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: SdpaGeometry
) -> Attention:
    """FlashAttention-4, CuTe DSL."""
    function = import_module("flash_attn.cute").flash_attn_func
    return _tried(_flash_call(function, geometry), "flash_attn.cute", q, k, v)


def flash_attention_3(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: SdpaGeometry
) -> Attention:
    """FlashAttention-3, its forward-only package."""
    function = import_module("fa3_fwd_interface").flash_attn_func
    return _tried(_flash_call(function, geometry), "fa3_fwd", q, k, v)


def cudnn_frontend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: SdpaGeometry
) -> Attention:
    """CuDNN through the graph API of cudnn-frontend: a plan for these extents and strides."""
    plan = SdpaFwd(q, k, v, _output_of(q), geometry, engines={"sdpa": "cudnn"})
    plan.compile()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        o = _output_of(q)
        plan.execute(q, k, v, o)
        return o

    return _tried(attend, plan.describe().splitlines()[1].strip(), q, k, v)


def torch_cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: SdpaGeometry
) -> Attention:
    """Torch's cuDNN backend, called without its dispatcher, which costs host time."""
    function = partial(
        torch.ops.aten._scaled_dot_product_cudnn_attention,
        attn_bias=None,
        compute_log_sumexp=False,
        is_causal=geometry.is_causal,
        scale=geometry.scale,
    )
    return _tried(_heads_first(function), "aten op", q, k, v)


def torch_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: SdpaGeometry
) -> Attention:
    """Torch's own FlashAttention-2, called without its dispatcher."""
    function = partial(
        torch.ops.aten._scaled_dot_product_flash_attention,
        is_causal=geometry.is_causal,
        scale=geometry.scale,
    )
    return _tried(_heads_first(function), "aten op", q, k, v)


def torch_default(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, geometry: SdpaGeometry
) -> Attention:
    """Whatever torch chooses, with K and V repeated: what a CPU has."""
    ratio = geometry.h_q // geometry.h_kv

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(ratio, dim=2) for x in (k, v))
        operands = (x.transpose(1, 2) for x in (q, k, v))
        o = functional.scaled_dot_product_attention(
            *operands, is_causal=geometry.is_causal, scale=geometry.scale
        )
        return o.transpose(1, 2)

    return _tried(attend, "dispatcher", q, k, v)


BUILDERS: dict[str, Build] = {
    FA4: flash_attention_4,
    FA3: flash_attention_3,
    CUDNN_FRONTEND: cudnn_frontend,
    TORCH_CUDNN: torch_cudnn,
    TORCH_FLASH: torch_flash,
}


def builders_of(device: str) -> dict[str, Build]:
    """Name to builder; a CPU has one more, so that there is one."""
    return BUILDERS | {TORCH: torch_default} if device == "cpu" else BUILDERS


def _flash_call(function: Callable[..., Any], geometry: SdpaGeometry) -> Attend:
    is_causal, scale = geometry.is_causal, geometry.scale

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found = function(q, k, v, softmax_scale=scale, causal=is_causal)
        return found[0] if isinstance(found, (tuple, list)) else found

    return attend


def _heads_first(function: Callable[..., Any]) -> Attend:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))[0].transpose(1, 2)

    return attend


def _output_of(q: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _tried(
    attend: Attend, words: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Attention:
    """After one call, which raises where the peer declines; a silent fallback is found later."""
    attend(q, k, v)
    return Attention(words, attend)
