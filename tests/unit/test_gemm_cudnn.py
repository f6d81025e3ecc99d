# SPDX-License-Identifier: Apache-2.0
"""The cuDNN engine of the product: plans, launches and handles, with a stand-in for cuDNN."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudnn_blocks import CaptureError, ContractError, NotServedError
from cudnn_blocks.stages import cudnn_graph
from cudnn_blocks.stages.cudnn_graph import HandlePool, PlanDeclinedError
from cudnn_blocks.stages.gemm.cudnn import CudnnGemm, W, X, Y
from cudnn_blocks.stages.gemm.stage import GemmModes, GemmStage
from cudnn_blocks.target import Target


class NotSupportedError(Exception): ...


class Tensor:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.fields.__setitem__(name, value) or self


class Graph:
    """Records how it was built, and runs the product in torch on the addresses' tensors."""

    def __init__(self, world: World, **arguments: Any) -> None:
        self.world, self.arguments, self.tensors = world, arguments, {}

    def tensor(self, **fields: Any) -> Tensor:
        self.tensors[fields["uid"]] = fields
        return Tensor(**fields)

    def matmul(self, x: Tensor, w: Tensor, **_: Any) -> Tensor:
        return Tensor()

    def get_execution_plan_count(self) -> int:
        return len(self.world.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return self.world.plans[index][0]

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return self.world.plans[index][1]

    def execute_plan_at_index(self, addresses: Any, _: Any, index: int, handle: Any) -> None:
        self.world.calls.append((self.tensors[X]["dim"][1], addresses, index, handle.stream))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class World:
    """What the stand-in has and saw."""

    def __init__(self) -> None:
        self.plans: list[tuple[str, int]] = [("frost_gemm[x]", 0), ("eng3_k1=0", 64), ("eng1", 0)]
        self.calls: list[Any] = []
        self.handles = 0
        self.is_capturing = False

    def create_handle(self) -> Any:
        self.handles += 1
        return SimpleNamespace(stream=None)


@pytest.fixture
def world(monkeypatch):
    world = World()
    module = SimpleNamespace(
        pygraph=lambda **arguments: Graph(world, **arguments),
        data_type=SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="fallback"),
        cudnnGraphNotSupportedError=NotSupportedError,
        create_handle=world.create_handle,
        set_stream=lambda handle, stream: setattr(handle, "stream", stream),
    )
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(cudnn_graph, "is_capturing", lambda: world.is_capturing)
    pool = HandlePool()
    monkeypatch.setattr(cudnn_graph, "HANDLES", pool)
    monkeypatch.setattr("cudnn_blocks.stages.gemm.cudnn.HANDLES", pool)
    return world


def operands(rows, n=16, k=8):
    return (
        torch.zeros(1, rows, k, dtype=torch.bfloat16),
        torch.zeros(n, k, dtype=torch.bfloat16),
        torch.zeros(1, rows, n, dtype=torch.bfloat16),
    )


def test_the_first_plan_of_the_library_without_workspace_is_pinned(world):
    gemm = CudnnGemm.build(5, 16, 8, "bf16", 0)
    assert str(gemm) == "plan eng1"
    assert [(size, plan.index) for size, plan in gemm.plans] == [(5, 2), (4, 2), (2, 2), (1, 2)]
    (_, plan), *_ = gemm.plans
    assert plan.graph.arguments["io_data_type"] == "bf16"
    assert plan.graph.tensors[W]["dim"] == [1, 8, 16]
    assert plan.graph.tensors[W]["stride"] == [128, 1, 8]


def test_no_plan_is_a_decline(world):
    world.plans = [("frost_gemm[x]", 0), ("eng3", 64)]
    with pytest.raises(PlanDeclinedError, match=r"no plan named eng\.\.\. without workspace"):
        CudnnGemm.build(5, 16, 8, "bf16", 0)


def test_a_decline_of_cudnn_is_the_stage_s_own(world, monkeypatch):
    world.plans = [("eng3", 64)]
    facts = {"device": 0, "cudnn_frontend": "1.32.0"}
    monkeypatch.setattr("cudnn_blocks.stages.gemm.stage.facts_of", lambda _: facts)
    stage = GemmStage("gemm", GemmModes(16, 8, "bf16"), 5, Target.parse("sm_90a"), "cudnn")
    with pytest.raises(NotServedError, match=r"^gemm: cudnn: .*no plan named eng.*cudnn on sm_80"):
        stage.check()


@pytest.mark.parametrize("rows", range(14))
def test_every_number_of_rows_is_covered_once(world, rows):
    gemm = CudnnGemm.build(13, 16, 8, "bf16", 0)
    x, w, y = operands(rows)
    gemm.launch(x, w, y, 77)
    first = 0
    for size, addresses, _, stream in world.calls:
        assert addresses[X] == x.data_ptr() + first * 8 * 2
        assert addresses[Y] == y.data_ptr() + first * 16 * 2
        assert addresses[W] == w.data_ptr()
        assert stream == 77
        first += size
    assert first == rows
    assert len(world.calls) == 1 or rows < 13


def test_operands_with_gaps_are_refused(world):
    gemm = CudnnGemm.build(4, 16, 8, "bf16", 0)
    _, w, y = operands(4)
    wide = torch.zeros(1, 4, 16, dtype=torch.bfloat16)[..., :8]
    with pytest.raises(ContractError, match="^x: expected contiguous with engine cudnn"):
        gemm.launch(wide, w, y, 0)
    assert not world.calls


def test_a_stream_first_seen_in_a_capture_gets_the_spare_handle(world):
    pool = HandlePool()
    pool.prepare(0)
    world.is_capturing = True
    with pool.bound(0, 5) as handle:
        assert handle.stream == 5
    with pool.bound(0, 5) as again:
        assert again is handle
    with pytest.raises(CaptureError, match="execute the plan once on the stream"), pool.bound(0, 6):
        pass
    assert world.handles == 1


def test_handles_are_bounded_and_none_is_destroyed(world, monkeypatch):
    monkeypatch.setattr(cudnn_graph, "MAX_HANDLES", 3)
    pool = HandlePool()
    for stream in range(10):
        with pool.bound(0, stream) as handle:
            assert handle.stream == stream
    assert world.handles == 3
