# SPDX-License-Identifier: Apache-2.0
"""The torch.library entries of the functional forms, ``torch.ops.cudnn_blocks.<name>``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cudnn_blocks.api_base import require_type
from cudnn_blocks.errors import GradModeError, NotServedError
from cudnn_blocks.stream import StreamLike

NAMESPACE = "cudnn_blocks"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines an op for CPU and CUDA, its fake kernel, and its refusal of autograd.

    Args:
        schema: name, arguments, mutations and results.
        run: the op, by position or by name; defaults of the schema may be left out.
        fake: the same on tensors without memory.

    Returns:
        The overload, to be called where a call has to be seen by the dispatcher.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    names = [argument.name for argument in overload._schema.arguments]

    def refuse_autograd(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for operand, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise GradModeError(f"{operand}: requires grad; {name} has no autograd formula")
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args, **kwargs)

    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    _LIBRARY.impl(name, refuse_autograd, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return overload


def defaults_of(overload: Any) -> dict[str, Any]:
    """Every argument of the schema, in its order, and its default; None where it has none."""
    return {argument.name: argument.default_value for argument in overload._schema.arguments}


def bind_arguments(
    defaults: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Arguments by name, in order; the dispatcher leaves out those that equal their defaults."""
    return {**defaults, **dict(zip(defaults, args, strict=False)), **(kwargs or {})}


def is_eager(operand: object) -> bool:
    """True where a call may bypass the dispatcher: a plain tensor with memory, and no tracing."""
    return (
        type(operand) is torch.Tensor and not operand.is_meta and not torch.compiler.is_compiling()
    )


def check_traceable(op: str, name: str, operand: object, current_stream: StreamLike | None) -> None:
    """Raises where a call that goes through the dispatcher cannot."""
    require_type(name, operand, torch.Tensor)
    if current_stream is not None:
        raise NotServedError(
            op, "current_stream under tracing", "current_stream=None, the ambient stream"
        )
