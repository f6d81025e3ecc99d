# SPDX-License-Identifier: Apache-2.0
"""What the ops of the Conv3D family share: operands whose shapes follow from the input's."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cudnn_blocks.api_base import APIBase, Sample
from cudnn_blocks.geometry.conv3d import Conv3dGeometry, check_zero_leading_frames
from cudnn_blocks.geometry.conv3d_shapes import ResidualMode
from cudnn_blocks.operands import Contiguous, Operand, OperandTable, Shape
from cudnn_blocks.stages.conv3d.stage import Conv3dModes, Conv3dStage
from cudnn_blocks.stream import StreamLike
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import row_major_stride

DTYPE = torch.bfloat16
Operands = Sequence[torch.Tensor | None]
_ALIGNMENT_BYTES = 16
_MAX_LAYOUTS = 64
"""Input shapes whose operands' layouts a plan remembers."""


@dataclass(frozen=True)
class _Layout:
    """A contiguous operand."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> _Layout:
        return cls(shape, row_major_stride(shape), math.prod(shape) * DTYPE.itemsize)


_Layouts = tuple[_Layout | None, ...]


class Conv3dFamilyOp(APIBase):
    """BF16 operands, contiguous and 16-byte aligned unless a subclass says otherwise.

    The geometry is read from the samples; every shape but the input's is derived from it.
    """

    operand_names: ClassVar[tuple[str, ...]]
    """In the order of ``execute``."""
    required_names: ClassVar[frozenset[str]]
    written_names: ClassVar[frozenset[str]]

    @abstractmethod
    def _read_geometry(self) -> Any:
        """The geometry of the samples; ContractError where they have none."""

    @abstractmethod
    def _input_shape(self) -> Shape:
        """The input's shape, dynamic extents by symbol."""

    @abstractmethod
    def _shapes(self, input_shape: Sequence[int]) -> Mapping[str, Sequence[int]]:
        """Shapes of the declared operands for an input of this shape."""

    def _plan(self) -> None:
        self.geometry = self._read_geometry()
        super()._plan()
        names = self.written_names & set(self._specs)
        self._is_written = tuple(name in names for name in self.operand_names)
        self._layouts: dict[tuple[int, ...], _Layouts] = {}

    def _build_operands(self) -> OperandTable:
        return OperandTable(tuple(map(self._operand, self.operand_names)), self._shapes)

    def _operand(self, name: str) -> Operand:
        return Operand(
            name,
            DTYPE,
            self._input_shape() if name == self.operand_names[0] else None,
            Contiguous(),
            is_mutated=name in self.written_names,
            is_declared=name in self._specs,
        )

    def _residual_mode(self) -> ResidualMode:
        specs = self._specs
        return ResidualMode.of(
            specs.get("residual"), specs.get("residual_bias"), specs.get("residual_output")
        )

    @property
    def written_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the declared tensors that a call at the samples' extents writes."""
        pairs = zip(self.operand_names, self._is_written, strict=True)
        return {name: self._specs[name].shape for name, is_written in pairs if is_written}

    def _is_plainly_good(self, operands: Operands) -> bool:
        """Everything that the full check asks, for one launch on tensors that are plainly right."""
        x = operands[0]
        if len(self._stages) != 1 or x is None:
            return False
        layouts = self._layouts.get(x.shape) or self._layouts_of(x.shape)
        spans: list[tuple[int, int, bool]] = []
        for tensor, layout, is_written in zip(operands, layouts, self._is_written, strict=True):
            if tensor is None and layout is None:
                continue
            if (
                tensor is None
                or layout is None
                or tensor.shape != layout.shape
                or tensor.stride() != layout.stride
                or tensor.dtype != DTYPE
                or tensor.get_device() != self._device_index
            ):
                return False
            low = tensor.data_ptr()
            if low % _ALIGNMENT_BYTES:
                return False
            high = low + layout.size_bytes
            for other_low, other_high, is_other_written in spans:
                if (is_written or is_other_written) and low < other_high and other_low < high:
                    return False
            spans.append((low, high, is_written))
        return True

    def _layouts_of(self, input_shape: tuple[int, ...]) -> _Layouts:
        """Layouts of all operands for a legal input; of none for one to look at closely."""
        axes = self._operands.operands[0].shape or ()
        extents = dict(zip(axes, input_shape, strict=True))
        limits = self._limits
        if any(not 0 < extents[symbol] <= limits[symbol] for symbol in limits):
            return (None,) * len(self.operand_names)
        shapes = self._shapes(input_shape)
        layouts = tuple(
            _Layout.of(tuple(shapes[name])) if name in shapes else None
            for name in self.operand_names
        )
        if len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()
        self._layouts[input_shape] = layouts
        return layouts

    def launch_by_name(
        self, operands: Mapping[str, torch.Tensor | None], current_stream: StreamLike | None
    ) -> None:
        """``execute`` on operands by name; names that the op does not have are passed over."""
        self._launch([operands.get(name) for name in self.operand_names], current_stream)


class ValidConv3dOp(Conv3dFamilyOp):
    """A valid convolution with one epilogue, on one stage."""

    epilogue: ClassVar[str]

    def __init__(
        self,
        samples: Mapping[str, Sample | None],
        *,
        zero_leading_frames: int,
        history_frames: int = 0,
        target: str | Target | None,
        engines: Mapping[str, str] | None,
    ) -> None:
        super().__init__(samples, None, target=target, engines=engines)
        self._zero_leading_frames = require_int("zero_leading_frames", zero_leading_frames)
        self._history_frames = require_int("history_frames", history_frames)

    def _read_geometry(self) -> Conv3dGeometry:
        check_zero_leading_frames(self._zero_leading_frames)
        specs = self._specs
        return Conv3dGeometry.from_shapes(specs["input"].shape, specs["packed_weight"].shape)

    def _input_shape(self) -> Shape:
        return ("N", "T", "H", "W", self.geometry.in_channels)

    def _build_stages(self, target: Target, engines: Mapping[str, str]) -> tuple[Conv3dStage, ...]:
        modes = Conv3dModes(
            self.epilogue,
            has_residual="residual" in self._specs,
            has_residual_bias="residual_bias" in self._specs,
            history_frames=self._history_frames,
            zero_leading_frames=self._zero_leading_frames,
        )
        shape = self._specs["input"].shape
        engine = engines.get(Conv3dStage.name)
        stage = Conv3dStage(self.geometry, modes, self.operand_names, shape, target, engine)
        return (stage,)


def require_int(name: str, value: object) -> int:
    """The value, or TypeError where it is not an int; a bool is none."""
    if type(value) is not int:
        raise TypeError(f"{name}: expected int, got {type(value).__name__}")
    return value


def geometry_of_call(x: torch.Tensor, packed_weight: torch.Tensor) -> Conv3dGeometry:
    """The geometry of a call, traced ones included: extents may be symbols, channels are not."""
    shape = (*x.shape[:-1], *map(int, x.shape[-1:]))
    return Conv3dGeometry.from_shapes(shape, tuple(map(int, packed_weight.shape)))
