# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention: the decode step of ``ShortConvolution`` on the causal conv1d update."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.compiler import is_compiling

from cudnn_blocks.errors import ContractError, NotServedError
from cudnn_blocks.integrations.calls import (
    DECLINES,
    Acceleration,
    CallCounts,
    ReplacedCall,
    accelerate,
    reason_of,
)
from cudnn_blocks.integrations.patching import TORCH, LayerRow
from cudnn_blocks.ops.conv1d_update_functional import find_plan

Result = tuple[torch.Tensor, torch.Tensor | None]
ORIGINAL = "ShortConvolution.step"


def accelerate_short_convolutions(model: nn.Module) -> Acceleration:
    """Runs the decode step of every ``ShortConvolution`` of a model on ``CausalConv1dUpdate``.

    ``step`` is what FLA's layers call for one token per sequence with autograd off; nothing else
    changes. A call with a residual, without a cache, of a layout or configuration that no plan
    serves, or under ``torch.compile``, runs FLA's own step on the same operands; ``stats()`` counts
    it with the reason. Weights are used where they are: an update in place, a move or a new dtype
    takes effect at the next step.

    Args:
        model: any module with ``fla.modules.ShortConvolution`` layers in BF16 or FP16, in
            evaluation mode. Caches are ``[N, D, W]``, as FLA makes them, and updated in place.

    Returns:
        The handle: ``stats()``, ``explain()``, ``restore()``.

    Raises:
        ImportError: flash-linear-attention is not installed.
        ContractError: a model without such layers, in training mode, of another dtype, or with its
            parameters on several devices; the model is left as it was.
        LifecycleError: the model is accelerated already.
        DriverError: the kernel did not compile.

    Example:
        >>> adapter = accelerate_short_convolutions(model)
        >>> logits = model(token, past_key_values=cache, use_cache=True)
        >>> adapter.stats()
        CallStats(accelerated=36, original={})

    Source: behaviour of ``ShortConvolution.step`` of fla-core 0.6.0 (MIT); no code taken.
    """
    return accelerate(
        model, _short_convolution(), "flash-linear-attention short convolution", "step", _Step
    )


def _short_convolution() -> type[nn.Module]:
    try:
        from fla.modules.causal_conv1d import ShortConvolution
    except ImportError as error:
        raise ImportError(
            f"flash-linear-attention cannot be imported ({error}); "
            "install the extra: pip install 'cudnn_blocks[fla]'"
        ) from error
    kind: type[nn.Module] = ShortConvolution
    return kind


class _Step(ReplacedCall):
    """``ShortConvolution.step`` of one module: its plan, made once, and FLA's own step."""

    def __init__(self, module: nn.Module, counts: CallCounts) -> None:
        self._module = module
        self._parameters = module._parameters
        self._original = cast("Callable[..., Result]", module.step)
        self._counts = counts
        self._prepare()

    def _prepare(self) -> None:
        """Finds the plan for the weights as they are now."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        self._addresses = weight.data_ptr(), 0 if bias is None else bias.data_ptr()
        self._weight = weight.detach().squeeze(1)
        self._bias = None if bias is None else bias.detach()
        channels, width = self._weight.shape
        x, cache = self._weight.new_empty(1, channels), self._weight.new_empty(1, channels, width)
        activation = cast("str | None", self._module.activation)
        self._plan = self._reason = self._execute = None
        try:
            self._plan = find_plan(x, cache, self._weight, self._bias, activation, None)
        except (ContractError, NotServedError, ImportError) as decline:
            self._reason = reason_of(decline)
        else:
            self._execute = self._plan.execute

    def row(self, name: str) -> LayerRow:
        """What runs the layer, for ``explain()``."""
        if self._plan is None:
            return LayerRow(name, ORIGINAL, TORCH, self._reason)
        (stage,) = self._plan.probe().stages
        return LayerRow(name, type(self._plan).__name__, str(stage.engine))

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        cache: torch.Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: torch.Tensor | None = None,
    ) -> Result:
        if is_compiling():
            return self._original(x, residual, cache, output_final_state, cu_seqlens)
        # A weight that was moved or replaced has another address: the one in use is kept alive.
        parameters, addresses = self._parameters, self._addresses
        bias = parameters["bias"]
        if (
            parameters["weight"].data_ptr() != addresses[0]  # type: ignore[union-attr]
            or (0 if bias is None else bias.data_ptr()) != addresses[1]
        ):
            self._prepare()
        if residual is not None:
            reason = "residual: expected None"
        elif cache is None:
            reason = "cache: expected a tensor"
        elif self._execute is None:
            reason = self._reason or ""
        else:
            rows = x.flatten(0, 1)
            out = torch.empty_like(rows)  # compact; a row pitch is not kept
            try:
                self._execute(rows, cache, self._weight, out, self._bias)
            except DECLINES as decline:
                reason = reason_of(decline)
            else:
                self._counts.accelerated += 1
                return out.view(x.shape), cache if output_final_state else None
        self._counts.original[reason] += 1
        return self._original(x, residual, cache, output_final_state, cu_seqlens)
