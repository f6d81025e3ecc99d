# SPDX-License-Identifier: Apache-2.0
"""The Conv3D family for one model: what it serves there, and a plan per shape that comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cudnn_blocks import ops
from cudnn_blocks.api_base import Sample
from cudnn_blocks.artifacts.warm_up import warm
from cudnn_blocks.geometry.conv3d import (
    CausalConv3dGeometry,
    Conv3dGeometry,
    RmsNormSiluGeometry,
)
from cudnn_blocks.ops.conv3d_family import DTYPE, Conv3dFamilyOp
from cudnn_blocks.plan_cache import PlanCache
from cudnn_blocks.support import SupportReport
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

Given = Mapping[str, torch.Tensor | None]
Shapes = Mapping[str, tuple[int, ...]]

PINS: Mapping[str, Mapping[str, str]] = {"sm_90a": {"conv3d": "hopper"}}
"""Engines pinned per target: where cuDNN beats the portable convolution, torch keeps the layer."""
MAX_PLANS = 512
"""Of one model; a size of video takes 60 to 90: first, second and later chunks differ."""
_SITES = (1, 3, 3, 3)


@dataclass(frozen=True)
class Service:
    """What the family says to a layer."""

    op: str
    engine: str | None
    """The engine that runs it; None where every one declines."""
    reason: str | None
    """Why it declines."""

    @classmethod
    def of(cls, op: type[Conv3dFamilyOp], report: SupportReport, engines: Iterable[str]) -> Service:
        """From a probe in which a stage was pinned to one of ``engines``, if to any."""
        if report.served:
            chosen = dict.fromkeys(stage.engine or "" for stage in report.stages)
            return cls(op.__name__, " + ".join(chosen), None)
        wanted = set(engines)
        declines = [
            f"{row.engine}: {row.reason}"
            for stage in report.stages
            for row in stage.engines
            if row.engine in wanted or (not wanted and row.status)
        ]
        return cls(op.__name__, None, "; ".join(declines) or report.decline)


@dataclass(frozen=True)
class _Bound:
    plan: Conv3dFamilyOp
    written: Shapes


class Family:
    """Probes and runs the family's ops on one target.

    Args:
        target: where the model is, or a name to ask about.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._pins = PINS.get(target.name, {})
        self._plans = PlanCache(MAX_PLANS)
        self._listed: list[Conv3dFamilyOp] | None = None

    # What is served.

    def conv_norm(self, in_channels: int, out_channels: int) -> Service:
        """A convolution with the norm and SiLU behind it."""
        geometry, inputs = _conv_inputs(in_channels, out_channels)
        shape = inputs["input"]
        rest = {
            "bias": (out_channels,),
            "gamma": (out_channels,),
            "padded_output": geometry.padded_output_shape(shape),
            "cache_output": geometry.cache_output_shape(shape),
        }
        return self._probe(ops.Conv3dRmsNormSiluPad, inputs, rest)

    def conv(self, in_channels: int, out_channels: int) -> Service:
        """A convolution alone."""
        geometry, inputs = _conv_inputs(in_channels, out_channels)
        rest = {"output": geometry.output_shape(inputs["input"])}
        return self._probe(ops.Conv3dRaw, inputs, rest)

    def conv_add(self, in_channels: int, out_channels: int) -> Service:
        """A convolution, its bias and the residual."""
        geometry, inputs = _conv_inputs(in_channels, out_channels)
        shape = inputs["input"]
        rest = {
            "bias": (out_channels,),
            "residual": geometry.output_shape(shape),
            "padded_output": geometry.spatial_padded_output_shape(shape),
        }
        return self._probe(ops.Conv3dBiasResidualPad, inputs, rest)

    def norm(self, channels: int) -> Service:
        """The norm and SiLU of a tensor."""
        geometry = RmsNormSiluGeometry(channels)
        shape = (*_SITES, channels)
        inputs = {"input": shape, "gamma": (channels,)}
        rest = {
            "padded_output": geometry.padded_output_shape(shape),
            "cache_output": geometry.cache_output_shape(shape),
        }
        return self._probe(ops.RmsNormSiluPad, inputs, rest)

    def causal_conv(self, in_channels: int, out_channels: int) -> Service:
        """The first layer, on raw frames."""
        geometry = CausalConv3dGeometry()
        if (in_channels, out_channels) != (geometry.in_channels, geometry.out_channels):
            served = f"{geometry.in_channels}->{geometry.out_channels}"
            reason = f"channels {in_channels}->{out_channels} (served: {served})"
            return Service(ops.CausalConv3dWithCache.__name__, None, reason)
        n, t, h, w = _SITES
        shape = (n, in_channels, t, h, w)
        inputs = {"input": shape, "packed_weight": geometry.packed_weight_shape}
        return self._probe(ops.CausalConv3dWithCache, inputs, causal_outputs(geometry, shape, 0))

    def _probe(self, op: type[Conv3dFamilyOp], inputs: Shapes, rest: Shapes) -> Service:
        samples = {
            f"sample_{name}": TensorSpec.contiguous(shape, DTYPE)
            for name, shape in {**inputs, **rest}.items()
        }
        engines = self._pins_of(op)
        report = op.probe(**samples, target=self.target, engines=engines)
        return Service.of(op, report, engines.values())

    def _pins_of(self, op: type[Conv3dFamilyOp]) -> Mapping[str, str]:
        return {} if op in _NOT_PINNED else self._pins

    # Running.

    def run(
        self,
        op: type[Conv3dFamilyOp],
        given: Given,
        written: Callable[[], Shapes],
        variant: bool = False,
        **knobs: int,
    ) -> dict[str, torch.Tensor]:
        """One call into new tensors, allocated on the current stream.

        Args:
            op: the class.
            given: the operands that are only read, by name; None for one that is not there.
            written: name to shape of those to be written, asked for with a new shape alone; they
                follow from the other arguments.
            variant: tells calls apart that differ in what is written.
            knobs: of the constructor.
        """
        shapes = (None if value is None else value.shape for value in given.values())
        key = (op, variant, *shapes, *knobs.values())
        bound: _Bound = self._plans.get(key, lambda: self._bind(op, given, written(), knobs))
        x = given["input"]
        assert x is not None
        results = {name: x.new_empty(shape) for name, shape in bound.written.items()}
        if self._listed is None:
            bound.plan.launch_by_name({**given, **results}, None)
        return results

    def _bind(
        self, op: type[Conv3dFamilyOp], given: Given, written: Shapes, knobs: Mapping[str, int]
    ) -> _Bound:
        x = given["input"]
        assert x is not None
        samples: dict[str, Sample | None] = dict(given)
        for name, shape in written.items():
            samples[name] = TensorSpec.contiguous(shape, DTYPE, x.device)
        build: Any = op
        arguments = {f"sample_{name}": sample for name, sample in samples.items()}
        pins = self._pins_of(op)
        plan: Conv3dFamilyOp = build(**arguments, **knobs, target=self.target, engines=pins)
        if self._listed is None:
            plan.compile()
        else:
            plan.check_support()
            self._listed.append(plan)
        return _Bound(plan, written)

    @contextmanager
    def listing(self) -> Iterator[None]:
        """Inside, calls launch nothing; the plans that they add are compiled at the end."""
        self._listed = []
        try:
            yield
            listed, self._listed = self._listed, None
            warm(listed)
        except BaseException:
            self._listed = None
            self._plans.clear()  # some of them are not compiled
            raise


def causal_outputs(
    geometry: CausalConv3dGeometry, input_shape: tuple[int, ...], history_frames: int
) -> Shapes:
    """What the first layer writes."""
    return {
        "padded_input": geometry.padded_input_shape(input_shape),
        "cache_output": geometry.cache_output_shape(input_shape, history_frames),
        "output": geometry.output_shape(input_shape),
    }


def _conv_inputs(in_channels: int, out_channels: int) -> tuple[Conv3dGeometry, Shapes]:
    geometry = Conv3dGeometry(in_channels, out_channels)
    shapes = {"input": (*_SITES, in_channels), "packed_weight": geometry.packed_weight_shape}
    return geometry, shapes


_NOT_PINNED = (ops.RmsNormSiluPad, ops.CausalConv3dWithCache)
"""Ops without the stage that ``PINS`` names."""
