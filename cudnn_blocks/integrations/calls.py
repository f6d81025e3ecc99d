# SPDX-License-Identifier: Apache-2.0
"""What the call-by-call integrations share: which path a call took, and the handle on a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from cudnn_blocks.api_base import require_type
from cudnn_blocks.errors import ContractError, GradModeError, LifecycleError, NotServedError
from cudnn_blocks.integrations.patching import Explanation, LayerRow, Patches
from cudnn_blocks.operands import check_activation_dtype

DECLINES = (ContractError, NotServedError, GradModeError)
"""What a plan raises before it writes anything: the original can still take the call."""


def reason_of(decline: Exception) -> str:
    """Why a plan declined, without the values of the call: one entry per cause in the counts."""
    if isinstance(decline, ContractError):
        return f"{decline.operand}: expected {decline.expected}"
    return str(decline)


@dataclass(frozen=True)
class CallStats:
    """Calls since the integration was switched on."""

    accelerated: int
    """Calls that ran on a plan."""
    original: Mapping[str, int]
    """Why the original code ran, and how often; empty if it never did."""


@dataclass
class CallCounts:
    """The running counts behind ``stats()``; exact for calls of one thread."""

    accelerated: int = 0
    original: Counter[str] = field(default_factory=Counter)

    def stats(self) -> CallStats:
        """The counts as they are now."""
        return CallStats(self.accelerated, dict(self.original))


class ReplacedCall:
    """A callable in place of a module's method. It knows that one module, so it has no copy."""

    def row(self, name: str) -> LayerRow:
        """What runs the layer, for ``explain()``."""
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise LifecycleError("an accelerated model has no copy: restore() it, then copy or save it")


class Acceleration:
    """The handle on an accelerated model: what runs where, how often, and the way back."""

    def __init__(
        self, title: str, rows: Iterable[LayerRow], patches: Patches, counts: CallCounts
    ) -> None:
        self._explanation = Explanation.of(title, rows)
        self._patches = patches
        self._counts = counts

    def explain(self) -> Explanation:
        """The layers, what runs each, and why where it is the original; prints as a table."""
        return self._explanation

    def stats(self) -> CallStats:
        """How many calls ran on plans, and how many on the original, by reason."""
        return self._counts.stats()

    def restore(self) -> None:
        """Puts the model's own methods back; a second call does nothing."""
        self._patches.restore()


def accelerate(
    model: nn.Module,
    kind: type[nn.Module],
    family: str,
    method: str,
    replacement: Callable[[nn.Module, CallCounts], ReplacedCall],
) -> Acceleration:
    """Replaces a method of every module of one class.

    Raises:
        TypeError, ContractError: as ``modules_of``; a parameter that is neither BF16 nor FP16.
        LifecycleError: an integration has one of the modules already.
    """
    found = modules_of(model, kind, family)
    for name, module in found.items():
        check_not_replaced(name, module, method)
        for parameter, tensor in module.named_parameters(prefix=name):
            check_activation_dtype(parameter, tensor.dtype)
    counts, rows = CallCounts(), []
    with Patches() as patches:
        for name, module in found.items():
            call = replacement(module, counts)
            patches.replace(module, method, call)
            rows.append(call.row(name))
    return Acceleration(type(model).__name__, rows, patches, counts)


def modules_of(model: object, kind: type[nn.Module], family: str) -> dict[str, nn.Module]:
    """The modules of one class in a model that can be accelerated, by their paths.

    Raises:
        TypeError: no ``nn.Module``.
        ContractError: a model without such a module, in training mode, or spread over devices by
            halves.
    """
    require_type("model", model, nn.Module)
    assert isinstance(model, nn.Module)
    found = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    if not found:
        got = f"{type(model).__name__} without one"
        raise ContractError("model", f"a model with {family} layers ({kind.__name__})", got)
    if model.training:
        raise ContractError("model", "a model in evaluation mode, after eval()", "training mode")
    is_dispatched = bool(getattr(model, "hf_device_map", None))
    for name, module in (found if is_dispatched else {"": model}).items():
        _check_one_device(name, module)
    return found


def _check_one_device(path: str, module: nn.Module) -> None:
    first: tuple[str, torch.device] | None = None
    for name, parameter in module.named_parameters(prefix=path):
        first = first or (name, parameter.device)
        if parameter.device != first[1]:
            expected = f"a parameter on {first[1]}, as {first[0]}"
            raise ContractError(name, expected, f"one on {parameter.device}")


def check_not_replaced(name: str, module: nn.Module, method: str) -> None:
    """LifecycleError where an integration has this module already."""
    if isinstance(vars(module).get(method), ReplacedCall):
        raise LifecycleError(f"{name}.{method} is accelerated already; restore() it first")
