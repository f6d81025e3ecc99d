# SPDX-License-Identifier: Apache-2.0
"""APIBase: the sealed lifecycle of every op and block."""

from __future__ import annotations

import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol, final

import torch

from cudnn_blocks.errors import (
    CaptureError,
    ContractError,
    DriverError,
    LifecycleError,
    NotServedError,
)
from cudnn_blocks.operands import Extents, OperandTable, look_of
from cudnn_blocks.stream import StreamLike, ambient_stream, is_capturing, resolve_stream
from cudnn_blocks.support import StageReport, SupportReport
from cudnn_blocks.target import Target
from cudnn_blocks.tensor_spec import TensorSpec
from cudnn_blocks.workspace import WorkspaceLayout

Sample = torch.Tensor | TensorSpec
Tensors = Sequence[torch.Tensor | None]
MAX_PASSED = 256
"""Calls that a plan remembers."""


class PlannedStage(Protocol):
    """What the lifecycle asks of a stage; ``stages.stage.Stage`` is the implementation."""

    @property
    def name(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def status(self) -> str: ...
    def check(self) -> None: ...
    def book(self, layout: WorkspaceLayout) -> None: ...
    def compile(self) -> None: ...
    def run_reference(self, operands: Tensors) -> None: ...
    def launch(self, operands: Tensors, stream: int) -> None: ...
    def report(self) -> StageReport: ...
    def describe(self) -> str: ...


class _Probe:
    """``plan.probe()``, or ``Op.probe(<constructor arguments>)`` without a plan at hand."""

    def __get__(self, plan: APIBase | None, op: type[APIBase]) -> Callable[..., SupportReport]:
        if plan is not None:
            return plan._probe
        return lambda *args, **kwargs: op(*args, **kwargs)._probe()


class APIBase(ABC):
    """An op or block: built from samples, probed, compiled once, executed many times.

    Subclasses fill ``op_name``, ``_build_operands``, ``_build_stages`` and a public ``execute``
    that passes its tensors to ``_launch``; the verbs below are sealed.

    Args:
        samples: name to sample; None for an optional operand that is not declared.
        geometry: frozen sizes with ``validate()``.
        target: what to compile for; None for the device of the samples.
        engines: stage name to engine name, pins.
    """

    op_name: ClassVar[str]
    _SEALED: ClassVar[frozenset[str]] = frozenset(
        {"check_support", "compile", "warm", "get_workspace_size", "probe", "describe", "__call__"}
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        broken = cls._SEALED & set(vars(cls))
        if broken:
            raise TypeError(f"{cls.__name__} overrides sealed verbs: {', '.join(sorted(broken))}")

    def __init__(
        self,
        samples: Mapping[str, Sample | None],
        geometry: Any,
        *,
        target: str | Target | None = None,
        engines: Mapping[str, str] | None = None,
    ) -> None:
        self.geometry = geometry
        self._specs = {
            name: TensorSpec.of(f"sample_{name}", sample)
            for name, sample in samples.items()
            if sample is not None
        }
        if target is not None:
            require_type("target", target, str, Target)
        self._asked_target = target
        self._engines = dict(engines or {})
        self._lock = threading.RLock()
        self._supported = False
        self._compiled = False
        self._stages: tuple[PlannedStage, ...] = ()
        self._operands = OperandTable(())
        self._limits: Extents = {}
        self._passed: dict[Hashable, Extents] = {}
        self._layout = WorkspaceLayout()
        self._device_index: int | None = None
        self._target: Target | None = None

    @abstractmethod
    def _build_operands(self) -> OperandTable:
        """The operand table of a valid geometry; ContractError for samples outside the contract."""

    @abstractmethod
    def _build_stages(self, target: Target, engines: Mapping[str, str]) -> tuple[PlannedStage, ...]:
        """The stages in launch order, unchecked."""

    def _check_extents(self, extents: Extents) -> None:  # noqa: B027 - optional hook
        """Raises ContractError where dynamic extents do not fit one another."""

    def _is_empty(self, extents: Extents) -> bool:
        """True where a call has nothing to compute and launches nothing."""
        return 0 in extents.values()

    def _book(self, layout: WorkspaceLayout) -> None:
        """Books the regions of the plan; by default what its stages book, in their order."""
        for stage in self._stages:
            stage.book(layout)

    def _compile_stages(self) -> None:
        """Compiles what ``_launch_stages`` launches."""
        for stage in self._stages:
            stage.compile()

    def _launch_stages(
        self, operands: Tensors, workspace: torch.Tensor | None, stream: int
    ) -> None:
        """Launches every stage on checked operands; by default one call each."""
        every = self._stage_operands(operands, workspace)
        for stage, own in zip(self._stages, every, strict=True):
            stage.launch(own, stream)

    def _stage_operands(
        self, operands: Tensors, workspace: torch.Tensor | None
    ) -> Sequence[Tensors]:
        """The tensors of each stage, workspace views among them; by default the op's own."""
        return [operands] * len(self._stages)

    def _is_plainly_good(self, operands: Tensors) -> bool:
        """True only if every check that the launcher itself does not make would pass.

        The launcher checks dtypes, static extents, strides, alignment and device before it
        launches. A single-launch op may answer True for the rest (presence, dynamic limits,
        overlap, emptiness) and so skip the full check; when in doubt, or for several launches,
        False.
        """
        return False

    @property
    def target(self) -> Target:
        """What the plan compiles for."""
        if self._target is None:
            self._target = self._resolve_target()
        return self._target

    @final
    def check_support(self) -> bool:
        """True, or raises a typed decline: ContractError, NotServedError, CudaUnavailableError."""
        with self._lock:
            if not self._supported:
                self._plan()
                for stage in self._stages:
                    stage.check()
                layout = WorkspaceLayout()
                self._book(layout)
                self._layout = layout
                self._supported = True
        return True

    @final
    def compile(self) -> None:
        """Compiles every stage, idempotent and thread-safe; the first launch finds all ready."""
        with self._lock:
            if self._compiled:
                return
            if is_capturing() and not self.target.is_cpu:
                raise self._cold_in_capture()
            self.check_support()
            self._compile_stages()
            self._compiled = True

    @final
    def warm(self, *, jobs: int | None = None, progress: bool = True) -> None:
        """``compile()`` with its kernels compiled side by side; see ``cudnn_blocks.warm``."""
        # By name: workers and their progress bar are above this layer, and seldom wanted.
        warm_up = importlib.import_module("cudnn_blocks.artifacts.warm_up")
        warm_up.warm([self], jobs=jobs, progress=progress)

    def _list_kernels(
        self, collecting: Callable[[], AbstractContextManager[Mapping[Any, Any]]]
    ) -> Mapping[Any, Any]:
        """What ``compile()`` would compile, as ``collecting`` lists it."""
        with self._lock:
            if self._compiled:
                return {}
            if is_capturing() and not self.target.is_cpu:
                raise self._cold_in_capture()
            self.check_support()
            with collecting() as wanted:
                self._compile_stages()
            return wanted

    @final
    def get_workspace_size(self) -> int:
        """Exact bytes of workspace that ``execute`` needs; legal before ``compile()``."""
        self.check_support()
        return self._layout.size_bytes

    @property
    def workspace_layout(self) -> WorkspaceLayout:
        """The regions of the workspace; legal before ``compile()``."""
        self.check_support()
        return self._layout

    probe = _Probe()

    @final
    def describe(self) -> str:
        """Stages, resolved engines, tiles and the workspace map."""
        self.check_support()
        lines = [f"{self.op_name} on {self.target}: {self.geometry}"]
        lines += [
            f"  {stage.name}: {stage.engine} ({stage.status}) {stage.describe()}"
            for stage in self._stages
        ]
        return "\n".join([*lines, str(self._layout)])

    @final
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compiles if need be, then executes."""
        if not self._compiled:
            self.compile()
        return self.execute(*args, **kwargs)  # type: ignore[attr-defined]

    def _plan(self) -> None:
        self._stages = ()
        self._passed.clear()
        self.geometry.validate()
        target = self.target
        self._device_index = self._sample_device_index()
        self._operands = self._build_operands()
        self._limits = self._operands.check_samples(self._specs)
        self._check_extents(self._limits)
        stages = self._build_stages(target, self._engines)
        names = {stage.name for stage in stages}
        if not names.issuperset(self._engines):
            raise ContractError("engines", f"stage names among {sorted(names)}", self._engines)
        self._stages = stages

    def _probe(self) -> SupportReport:
        decline: Exception | None = None
        try:
            self.check_support()
        except (ContractError, NotServedError, RuntimeError) as error:
            decline = error
        return SupportReport(
            op=self.op_name,
            target=str(self._target or self._asked_target or "unknown"),
            served=decline is None,
            decline=None if decline is None else str(decline),
            decline_type=None if decline is None else type(decline).__name__,
            workspace_bytes=self._layout.size_bytes if decline is None else None,
            stages=[stage.report() for stage in self._stages],
        )

    def _resolve_target(self) -> Target:
        if self._asked_target is not None:
            return Target.parse(self._asked_target)
        return Target.of_device(next(iter(self._specs.values())).device)

    def _sample_device_index(self) -> int | None:
        """The GPU that the plan is bound to; None where the samples are on none."""
        first, *others = self._specs.items()
        name, device = first[0], first[1].device
        for other, spec in others:
            if spec.device != device:
                raise ContractError(other, f"a tensor on {device}, as {name}", spec.device)
        if device.type != "cuda":
            return None
        own = Target.of_device(device)
        if own.name != self.target.name:
            raise ContractError("target", f"{own}, where the samples are", self.target)
        return torch.cuda.current_device() if device.index is None else device.index

    @final
    def _launch(
        self,
        operands: Tensors,
        current_stream: StreamLike | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """Checks the call and launches every stage on one resolved stream."""
        if not self._compiled:
            self._refuse_cold()
        refused: Exception | None = None
        if self._device_index is not None:
            try:
                # The launcher sees to it that operands share a device, not that it is the plan's.
                first: Any = operands[0]
                is_at_home = first.get_device() == self._device_index
                if is_at_home and self._is_plainly_good(operands) and not needs_grad(operands):
                    stream = (
                        ambient_stream(self._device_index)
                        if current_stream is None
                        else resolve_stream(current_stream, self._device_index)
                    )
                    self._stages[0].launch(operands, stream)
                    return
            except Exception as error:
                refused = error
        self._launch_checked(operands, current_stream, workspace, refused)

    def _launch_checked(
        self,
        operands: Tensors,
        current_stream: StreamLike | None,
        workspace: torch.Tensor | None,
        refused: Exception | None,
    ) -> None:
        device = self._call_device(operands)
        extents = self._check_call(operands, workspace, device)
        if self._is_empty(extents):
            return
        canonical = self._operands.canonical(operands)
        if self.target.is_cpu:
            every = self._stage_operands(canonical, workspace)
            for stage, own in zip(self._stages, every, strict=True):
                stage.run_reference(own)
            return
        assert device.index is not None
        stream = resolve_stream(current_stream, device.index)
        try:
            self._launch_stages(canonical, workspace, stream)
        except Exception as error:
            raise DriverError(f"{self.op_name}: the launch failed: {error}") from (refused or error)

    def _check_call(
        self, operands: Tensors, workspace: torch.Tensor | None, device: torch.device
    ) -> Extents:
        """The extents of a call that is right; one that looks the same as before is not checked."""
        look = look_of((*operands, workspace))
        known = None if look is None else self._passed.get(look)
        if known is not None and not needs_grad(operands):
            return known
        extents = self._operands.check_call(operands, self._limits, device)
        self._check_extents(extents)
        self._layout.check(workspace, device)
        self._operands.check_workspace(workspace, operands)
        if look is not None:
            if len(self._passed) >= MAX_PASSED:
                self._passed.clear()
            self._passed[look] = extents
        return extents

    def _call_device(self, operands: Tensors) -> torch.device:
        if self._device_index is not None:
            return torch.device("cuda", self._device_index)
        if self.target.is_cpu:
            return torch.device("cpu")
        operand, tensor = self._operands.operands[0], operands[0]
        spec = TensorSpec.of(operand.name, tensor)
        if spec.device.type != "cuda":
            raise ContractError(operand.name, f"a tensor on a {self.target} GPU", spec.device)
        found = Target.of_device(spec.device)
        if found.name != self.target.name:
            raise ContractError(operand.name, f"a tensor on a {self.target} GPU", found)
        return spec.device

    def _refuse_cold(self) -> None:
        if is_capturing():
            raise self._cold_in_capture()
        raise LifecycleError(f"{self.op_name}: execute() before compile(); call compile() first")

    def _cold_in_capture(self) -> CaptureError:
        return CaptureError(
            f"{self.op_name}: this plan is not compiled and a CUDA graph capture is running; "
            "call compile(), or the same functional call, once before the capture begins"
        )


def require_type(name: str, value: object, *types: type) -> None:
    """Raises TypeError, naming the argument, unless ``value`` is of one of ``types``."""
    if not isinstance(value, types):
        wanted = " or ".join(kind.__name__ for kind in types)
        raise TypeError(f"{name}: expected {wanted}, got {type(value).__name__}")


def needs_grad(operands: Tensors) -> bool:
    """True where grad mode is on and a tensor requires grad."""
    if torch.is_grad_enabled():
        for tensor in operands:
            if tensor is not None and tensor.requires_grad:
                return True
    return False
