# SPDX-License-Identifier: Apache-2.0
"""What engines on the cuDNN graph API share: the optional package, handles, pinned plans."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cudnn_blocks.errors import CaptureError, NotServedError
from cudnn_blocks.stages.capabilities import Constraint
from cudnn_blocks.stream import is_capturing

if TYPE_CHECKING:
    from cudnn_blocks.stages.stage import Stage

CUDNN = "cudnn"
DISTRIBUTION = "nvidia-cudnn-frontend"
MINIMUM_RELEASE = (1, 32)
PLAN_PREFIX = "eng"
"""Plans of the cuDNN library; the frontend's own kernels have other names."""
MAX_HANDLES = 64


@functools.cache
def frontend_version() -> str | None:
    """Version of the installed cudnn-frontend, or None."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class FrontendRelease:
    """Versions of cudnn-frontend from a release on; a constraint."""

    minimum: tuple[int, ...] = MINIMUM_RELEASE

    def __contains__(self, value: object) -> bool:
        return isinstance(value, str) and _release(value) >= self.minimum

    def __str__(self) -> str:
        wanted = ".".join(str(part) for part in self.minimum)
        return f"{DISTRIBUTION} {wanted} and up"


@dataclass(frozen=True)
class PresentDevice:
    """A GPU of this process, on which plans can be built; a constraint."""

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int)

    def __str__(self) -> str:
        return "samples on a GPU at hand"


SERVED: Mapping[str, Constraint] = {"device": PresentDevice(), "cudnn_frontend": FrontendRelease()}
"""What every row of a cuDNN engine asks beside its own facts."""


def facts_of(device: torch.device | None) -> dict[str, object]:
    """The facts for ``SERVED``.

    Args:
        device: of the samples; None, meta and cpu are no GPU.
    """
    index = None
    if device is not None and device.type == "cuda" and torch.cuda.is_available():
        index = torch.cuda.current_device() if device.index is None else device.index
    return {"device": index, "cudnn_frontend": frontend_version()}


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


class HandlePool:
    """cuDNN handles, one per device and stream, and a spare one per device for captures.

    A handle is made outside captures, where it may allocate: with a plan and, waiting for the
    device, by the first call on a stream. A stream that is first seen in a capture gets the spare.
    The least recently used handle moves to a new stream when there are ``MAX_HANDLES``; none is
    ever destroyed, which would synchronise.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bound: OrderedDict[tuple[int, int], _Handle] = OrderedDict()
        self._spare: dict[int, _Handle] = {}

    def prepare(self, device_index: int) -> None:
        """Makes the spare handle of a device; called when a plan is built."""
        with self._lock:
            if device_index not in self._spare and not is_capturing():
                self._spare[device_index] = _make_handle(device_index)

    @contextmanager
    def bound(self, device_index: int, stream: int) -> Iterator[Any]:
        """The stream's handle, for one thread at a time."""
        with self._lock:
            handle = self._find(device_index, stream)
        with handle.lock:
            _set_stream(handle.handle, stream)
            yield handle.handle

    def _find(self, device_index: int, stream: int) -> _Handle:
        key = (device_index, stream)
        handle = self._bound.get(key)
        if handle is None:
            take = self._take_spare if is_capturing() else self._take_new
            handle = self._bound[key] = take(device_index)
        self._bound.move_to_end(key)
        return handle

    def _take_spare(self, device_index: int) -> _Handle:
        spare = self._spare.pop(device_index, None)
        if spare is None:
            raise CaptureError(
                "cudnn: this stream has no handle and a CUDA graph capture is running; execute the "
                "plan once on the stream before the capture begins"
            )
        return spare

    def _take_new(self, device_index: int) -> _Handle:
        used = next((key for key in self._bound if key[0] == device_index), None)
        if used is None or len(self._bound) < MAX_HANDLES:
            return _make_handle(device_index)
        return self._bound.pop(used)


HANDLES = HandlePool()


@dataclass
class _Handle:
    handle: Any
    lock: threading.Lock


def _make_handle(device_index: int) -> _Handle:
    import cudnn

    with torch.cuda.device(device_index):
        return _Handle(cudnn.create_handle(), threading.Lock())


def _set_stream(handle: Any, stream: int) -> None:
    import cudnn

    cudnn.set_stream(handle, stream)


class PlanDeclinedError(Exception):
    """cuDNN has no plan for a graph that fits the rules here; the message says why."""


@contextmanager
def declines_of(stage: Stage) -> Iterator[None]:
    """Turns a decline of cuDNN into the stage's own."""
    try:
        yield
    except PlanDeclinedError as error:
        row = next(row for row in stage.rows if row.engine == CUDNN)
        raise NotServedError(stage.name, f"{CUDNN}: {error}", str(row)) from error


@dataclass(frozen=True)
class PinnedPlan:
    """One execution plan of a graph, which needs no workspace."""

    graph: Any
    index: int
    name: str

    def execute(self, addresses: Mapping[int, int], device_index: int, stream: int) -> None:
        """Launches on ``stream``.

        Args:
            addresses: tensor uid to device address.
            device_index: where they are.
            stream: handle.
        """
        with torch.cuda.device(device_index), HANDLES.bound(device_index, stream) as handle:
            self.graph.execute_plan_at_index(dict(addresses), None, self.index, handle)


def pin_plan(graph: Any, prefix: str = PLAN_PREFIX) -> PinnedPlan:
    """Builds the best plan whose name has a prefix and which needs no workspace.

    Raises:
        PlanDeclinedError: there is none.
    """
    import cudnn

    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
    except cudnn.cudnnGraphNotSupportedError as error:
        raise PlanDeclinedError(str(error)) from error
    for index in range(graph.get_execution_plan_count()):
        name = str(graph.get_plan_name_at_index(index))
        if not name.startswith(prefix):
            continue
        try:
            graph.build_plan_at_index(index)
        except cudnn.cudnnGraphNotSupportedError:
            continue
        if graph.get_workspace_size_plan_at_index(index) == 0:
            return PinnedPlan(graph, index, name)
    raise PlanDeclinedError(f"no plan named {prefix}... without workspace")
