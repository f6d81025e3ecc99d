# SPDX-License-Identifier: Apache-2.0
"""``ops.causal_conv1d_update``: cached plans behind a function, and its torch.library entry."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from cudnn_blocks.api_base import require_type
from cudnn_blocks.errors import NotServedError
from cudnn_blocks.geometry import CausalConv1dGeometry
from cudnn_blocks.operands import ANY_EXTENT
from cudnn_blocks.ops.allocate import run_on_stream
from cudnn_blocks.ops.conv1d_update import CausalConv1dUpdate
from cudnn_blocks.ops.library import check_traceable, is_eager, register
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

_OP_NAME = "causal_conv1d_update"


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    current_stream: StreamLike | None = None,
) -> torch.Tensor:
    """One decode step of a depthwise causal convolution; updates ``conv_state`` in place.

    The operands, rounding and errors are those of :class:`CausalConv1dUpdate`; bad slots trap. The
    first call of a device, dtype, D, W, L, state layout, activation and set of optional operands
    compiles; every batch size, number of slots and row pitch after that finds the plan.

    Args:
        x: ``[N, D]``, BF16 or FP16.
        conv_state: ``[S, D, L]``, mutated.
        weight: ``[D, W]``.
        bias: ``[D]`` or None.
        activation: None or ``"identity"``; ``"silu"`` or ``"swish"``.
        cache_seqlens: reserved; has to be None.
        conv_state_indices: int32 ``[N]`` or None; -1 is a padding row.
        current_stream: stream to launch on; None for torch's current stream of x's device.

    Returns:
        ``[N, D]``, contiguous, new. Its memory is allocated on the stream of the launch and is safe
        to use on torch's current stream once the two are synchronised.

    Under ``torch.compile`` the op ``torch.ops.cudnn_blocks.causal_conv1d_update`` stands for the
    call, with the mutation declared; eager calls bypass the dispatcher.
    """
    if cache_seqlens is not None:
        raise NotServedError(_OP_NAME, "cache_seqlens", "cache_seqlens=None")
    if is_eager(x):
        return _run(x, conv_state, weight, bias, activation, conv_state_indices, current_stream)
    check_traceable(_OP_NAME, "x", x, current_stream)
    out: torch.Tensor = _OVERLOAD(
        x, conv_state, weight, bias, activation, conv_state_indices=conv_state_indices
    )
    return out


def _run(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor | None,
    current_stream: StreamLike | None,
) -> torch.Tensor:
    plan = find_plan(x, conv_state, weight, bias, activation, conv_state_indices)
    if current_stream is None:  # a decode step is short: no closure on its usual path
        out = torch.empty_like(x)  # compact; a row pitch is not kept
        plan.execute(x, conv_state, weight, out, bias, conv_state_indices)
        return out

    def launch(stream: StreamLike | None) -> list[torch.Tensor]:
        out = torch.empty_like(x)
        plan.execute(x, conv_state, weight, out, bias, conv_state_indices, stream)
        return [out]

    return run_on_stream(x, current_stream, launch)[0]


def find_plan(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor | None,
) -> CausalConv1dUpdate:
    """The plan that serves these operands at any batch size, number of slots and row pitch."""
    try:
        key: Hashable = (
            CausalConv1dUpdate,
            x.get_device(),
            x.dtype,
            x.dim(),
            conv_state.stride(),  # of a served layout, these say what L is
            weight.shape,
            activation,
            bias is None,
            conv_state_indices is None,
        )
    except AttributeError:
        for name, operand in (("x", x), ("conv_state", conv_state), ("weight", weight)):
            require_type(name, operand, torch.Tensor)
        raise
    plan: CausalConv1dUpdate | None = PLANS.find(key)
    if plan is not None:
        return plan

    def build() -> CausalConv1dUpdate:
        plan = _build_unbounded(x, conv_state, weight, bias, activation, conv_state_indices)
        plan.compile()
        return plan

    built: CausalConv1dUpdate = PLANS.get(key, build)
    return built


def _build_unbounded(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    conv_state_indices: torch.Tensor | None,
) -> CausalConv1dUpdate:
    device, dtype = x.device, x.dtype
    # The weight's sizes are part of the plan's key, x's are not: the plan has to be theirs.
    channels, width = weight.shape if weight.dim() == 2 else (1, 1)
    state_len = conv_state.shape[2] if conv_state.dim() == 3 else width

    def spec(*shape: int, of: torch.dtype = dtype) -> TensorSpec:
        return TensorSpec.contiguous(shape, of, device)

    state = spec(ANY_EXTENT, channels, state_len)
    if tuple(conv_state.stride()[1:]) == (1, channels):
        stride = (channels * state_len, 1, channels)
        state = TensorSpec(dtype, state.shape, stride, device)
    return CausalConv1dUpdate(
        spec(ANY_EXTENT, channels) if x.dim() == 2 else spec(ANY_EXTENT, *x.shape[1:]),
        state,
        spec(channels, width),
        spec(ANY_EXTENT, channels),
        CausalConv1dGeometry(channels, width, state_len),
        sample_bias=None if bias is None else spec(channels),
        sample_conv_state_indices=(
            None if conv_state_indices is None else spec(ANY_EXTENT, of=torch.int32)
        ),
        activation=activation,
        target=Target.of_device(device),
    )


def _library_op(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    return _run(x, conv_state, weight, bias, activation, conv_state_indices, None)


def _library_fake(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    return x.new_empty(x.shape)


_OVERLOAD = register(
    f"{_OP_NAME}(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, "
    "str? activation=None, *, Tensor? conv_state_indices=None) -> Tensor",
    _library_op,
    _library_fake,
)
