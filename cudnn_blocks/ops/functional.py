# SPDX-License-Identifier: Apache-2.0
"""FunctionalOp: an op as a function of its inputs, with cached plans and outputs of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cudnn_blocks.api_base import require_type
from cudnn_blocks.ops.allocate import run_on_stream
from cudnn_blocks.ops.conv3d_family import DTYPE, Conv3dFamilyOp
from cudnn_blocks.ops.library import (
    bind_arguments,
    check_traceable,
    defaults_of,
    is_eager,
    register,
)
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.tensor_spec import TensorSpec

Arguments = Mapping[str, Any]
Shapes = Mapping[str, Sequence[int]]
_KNOB_TYPES = {"int": int, "bool": bool}


class FunctionalOp:
    """Calls an op of the Conv3D family with its inputs alone.

    The shared plan cache is asked by device, shapes, which operands are given, and knobs. A new
    shape makes a new plan, which finds its kernels compiled unless it chooses another tile.

    Args:
        op: the class; its samples and operands have the schema's names.
        schema: of torch.library, tensors before knobs and everything positional.
        outputs: names of the results in order; the last may be absent from a call.
        shapes: arguments of a call to the shape of each tensor to allocate, the results among them.
        knobs: those of the schema that the class takes; the others matter to ``shapes`` alone.
    """

    def __init__(
        self,
        op: type[Conv3dFamilyOp],
        schema: str,
        outputs: tuple[str, ...],
        shapes: Callable[[Arguments], Shapes],
        knobs: tuple[str, ...] = (),
    ) -> None:
        self._op = op
        self._outputs = outputs
        self._shapes = shapes
        self._knobs = knobs
        self._overload = register(schema, self._run_traced, self._fake)
        self._name = schema.partition("(")[0]
        arguments = self._overload._schema.arguments
        self._defaults = defaults_of(self._overload)
        self._knob_types = {
            argument.name: _KNOB_TYPES[str(argument.type)]
            for argument in arguments
            if str(argument.type) in _KNOB_TYPES
        }

    def __call__(
        self, *args: Any, current_stream: StreamLike | None = None
    ) -> dict[str, torch.Tensor | None]:
        """The results by name, None for one that the call does not have."""
        operand = args[0]
        if is_eager(operand):
            results = self._run(bind_arguments(self._defaults, args), current_stream)
        else:
            check_traceable(self._name, "input", operand, current_stream)
            results = self._overload(*args)
        return {
            name: results[i] if i < len(results) else None for i, name in enumerate(self._outputs)
        }

    def _run_traced(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return self._run(bind_arguments(self._defaults, args, kwargs), None)

    def _fake(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        arguments = bind_arguments(self._defaults, args, kwargs)
        shapes = self._shapes(arguments)
        return [
            arguments["input"].new_empty(shapes[name]) for name in self._outputs if name in shapes
        ]

    def _run(
        self, arguments: dict[str, Any], current_stream: StreamLike | None
    ) -> list[torch.Tensor]:
        plan = self._find_plan(arguments)
        device = arguments["input"].device
        shapes = plan.written_shapes

        def launch(stream: StreamLike | None) -> list[torch.Tensor]:
            written = {
                name: torch.empty(shape, dtype=DTYPE, device=device)
                for name, shape in shapes.items()
            }
            operands = {**arguments, **written}
            plan.launch_by_name(operands, stream)
            return [written[name] for name in self._outputs if name in written]

        return run_on_stream(arguments["input"], current_stream, launch)

    def _find_plan(self, arguments: dict[str, Any]) -> Conv3dFamilyOp:
        for name, kind in self._knob_types.items():
            if type(arguments[name]) is not kind:  # a bool is an int, and not one of these
                got = type(arguments[name]).__name__
                raise TypeError(f"{name}: expected {kind.__name__}, got {got}")
        shapes = (getattr(value, "shape", value) for value in arguments.values())
        key = (self._op, arguments["input"].get_device(), *shapes)

        def build() -> Conv3dFamilyOp:
            self._check_tensors(arguments)
            plan = self._build(arguments)
            plan.compile()
            return plan

        try:
            plan: Conv3dFamilyOp = PLANS.get(key, build)
        except TypeError:  # what is no tensor may not hash
            self._check_tensors(arguments)
            raise
        return plan

    def _check_tensors(self, arguments: Arguments) -> None:
        """TypeError for anything but tensors, or None for an optional one."""
        for name, value in arguments.items():
            if name in self._knob_types or isinstance(value, torch.Tensor):
                continue
            if value is not None or name in self._op.required_names:
                require_type(name, value, torch.Tensor)

    def _build(self, arguments: Arguments) -> Conv3dFamilyOp:
        device = arguments["input"].device
        samples = {name: arguments.get(name) for name in self._op.operand_names}
        for name, shape in self._shapes(arguments).items():
            samples[name] = TensorSpec.contiguous(shape, DTYPE, device)
        knobs = {name: arguments[name] for name in self._knobs}
        build: Callable[..., Conv3dFamilyOp] = self._op
        return build(**{f"sample_{name}": of for name, of in samples.items()}, **knobs)
