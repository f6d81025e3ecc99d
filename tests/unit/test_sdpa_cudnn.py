# SPDX-License-Identifier: Apache-2.0
"""The cuDNN engine of attention: what it declines, and what it asks of a stand-in for cuDNN."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudnn_blocks import NotServedError, SdpaGeometry
from cudnn_blocks.errors import ContractError
from cudnn_blocks.stages import cudnn_graph
from cudnn_blocks.stages.attention import cudnn as engine
from cudnn_blocks.stages.attention import stage as attention
from cudnn_blocks.stages.attention.cudnn import LSE, OUT, CudnnSdpa, K, Q, V
from cudnn_blocks.stages.attention.stage import SdpaModes, SdpaStage
from cudnn_blocks.target import GPU_TARGET_NAMES, Target
from tests.helpers.sdpa_problem import make_problem, spec_plan

PIN = {"sdpa": "cudnn"}


class NotSupportedError(Exception): ...


class Tensor:
    """Records what the setters are given."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        def record(value: Any) -> Tensor:
            self.fields[name.removeprefix("set_")] = value
            return self

        return record


class Graph:
    """A graph whose only plan needs no workspace."""

    def __init__(self, names: tuple[str, ...], **_: Any) -> None:
        self.names, self.tensors, self.calls = names, {}, []

    def tensor(self, **fields: Any) -> Tensor:
        self.tensors[fields["name"]] = Tensor(**fields)
        return self.tensors[fields["name"]]

    def sdpa(self, **asked: Any) -> tuple[Tensor, Tensor]:
        self.asked = asked
        self.tensors |= {"o": Tensor(), "lse": Tensor()}
        return self.tensors["o"], self.tensors["lse"]

    def create_execution_plans(self, _: Any) -> None:
        if not self.names:
            raise NotSupportedError("no engine")

    def get_execution_plan_count(self) -> int:
        return len(self.names)

    def get_plan_name_at_index(self, index: int) -> str:
        return self.names[index]

    def get_workspace_size_plan_at_index(self, _: int) -> int:
        return 0

    def execute_plan_at_index(self, addresses: Any, _: Any, index: int, handle: Any) -> None:
        self.calls.append((addresses, index, handle))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def stand_in(monkeypatch):
    """A cuDNN whose plans have the given names, on a device that is there."""
    graphs: list[Graph] = []

    def install(*names: str) -> list[Graph]:
        def pygraph(**arguments: Any) -> Graph:
            graphs.append(Graph(names, **arguments))
            return graphs[-1]

        module = SimpleNamespace(
            pygraph=pygraph,
            data_type=SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32"),
            diagonal_alignment=SimpleNamespace(TOP_LEFT="top-left", BOTTOM_RIGHT="bottom-right"),
            heur_mode=SimpleNamespace(A="A", FALLBACK="fallback"),
            cudnnGraphNotSupportedError=NotSupportedError,
            create_handle=lambda: "handle",
            set_stream=lambda handle, stream: None,
        )
        monkeypatch.setitem(sys.modules, "cudnn", module)
        handles = cudnn_graph.HandlePool()
        for user in (cudnn_graph, engine):
            monkeypatch.setattr(user, "HANDLES", handles)
        facts = {"device": 0, "cudnn_frontend": "1.32.0"}
        monkeypatch.setattr(attention, "facts_of", lambda device: facts)
        monkeypatch.setattr(torch.cuda, "device", lambda index: SimpleContext())
        return graphs

    return install


class SimpleContext:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def stage_of(problem: Any, **knobs: Any) -> SdpaStage:
    modes = SdpaModes.of(
        problem.geometry,
        "bf16",
        has_gate=knobs.get("has_gate", False),
        has_lse=problem.operands["lse"] is not None,
        has_seq_lens=knobs.get("has_seq_lens", False),
    )
    plan = problem.plan()
    samples = [plan._specs[name] for name in ("q", "k", "v", "o")]
    return SdpaStage(modes, problem.geometry.scale, samples, Target.parse("sm_90a"), "cudnn")


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
def test_a_named_target_without_a_device(target):
    with pytest.raises(NotServedError, match=r"cudnn: device=None \(served: samples on a GPU"):
        spec_plan(target=target, engines=PIN).check_support()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"has_gate": True}, r"gate=True \(served: False\)"),
        ({"has_seq_lens": True}, r"seq_lens=True \(served: False\)"),
        ({"window_right": 1}, r"window=right of the diagonal \(served: none, left of a causal"),
        ({"is_causal": False, "window_left": 3}, r"window=without a causal diagonal \(served"),
        ({"causal_bottom_right": True, "sk": 9}, r"rows_without_keys=True \(served: False\)"),
        ({"window_left": 4, "sk": 9}, r"rows_without_keys=True \(served: False\)"),
        ({"d_head": 96}, r"d_head=96 \(served: 64, 128, 256\)"),
    ],
)
def test_what_it_does_not_serve(options, match):
    plan = spec_plan(s=10, target="sm_90a", engines=PIN, **options)
    with pytest.raises(NotServedError, match=f"^sdpa: cudnn: {match}"):
        plan.check_support()


@pytest.mark.parametrize(
    ("mask", "asked"),
    [
        ({}, ("top-left", 0, None)),
        ({"window_right": 0}, ("top-left", 0, None)),
        ({"causal_bottom_right": True, "window_left": 5}, ("bottom-right", 0, 6)),
        ({"window_left": 0}, ("top-left", 0, 1)),
        ({"is_causal": False}, ("top-left", None, None)),
    ],
)
def test_what_it_asks_for(stand_in, mask, asked):
    graphs = stand_in("kernel_of_the_frontend", "eng4_k24=0")
    problem = make_problem(2, 7, heads=(4, 2), is_slab=True, **mask)
    stage = stage_of(problem)
    stage.check()
    assert stage.engine == "cudnn"
    assert "plan eng4_k24=0" in stage.describe()
    (graph,) = graphs
    got = graph.asked
    assert asked == tuple(
        got[f"diagonal_{name}"] for name in ("alignment", "band_right_bound", "band_left_bound")
    )
    assert (got["attn_scale"], got["generate_stats"]) == (0.125, True)
    width = 12 * 64
    for name, heads, uid in (("q", 4, Q), ("k", 2, K), ("v", 2, V)):
        fields = graph.tensors[name].fields
        assert fields["dim"] == [2, heads, 7, 64]
        assert fields["stride"] == [7 * width, 64, width, 1]
        assert fields["uid"] == uid
    assert graph.tensors["o"].fields["stride"] == [7 * 4 * 64, 64, 4 * 64, 1]
    assert graph.tensors["lse"].fields["dim"] == [2, 4, 7, 1]
    assert graph.tensors["lse"].fields["stride"] == [28, 7, 1, 1]


def test_a_launch(stand_in):
    graphs = stand_in("eng4_k24=0")
    problem = make_problem(2, 7)
    stage = stage_of(problem)
    stage.check()
    stage.compile()
    stage.launch(list(problem.operands.values()), 7)
    uids = {"q": Q, "k": K, "v": V, "o": OUT, "lse": LSE}
    addresses = {uid: problem[name].data_ptr() for name, uid in uids.items()}
    assert graphs[0].calls == [(addresses, 0, "handle")]
    other = make_problem(2, 6)
    with pytest.raises(ContractError, match="^q: expected shape .* the sample's, with engine"):
        stage.launch(list(other.operands.values()), 7)
    stage.check_extents(2, 7, 7)
    with pytest.raises(NotServedError, match="^sdpa: B=2, S=6, Sk=7 with engine cudnn is not"):
        stage.check_extents(2, 6, 7)


def test_no_plan_is_a_decline(stand_in):
    for names, why in (((), "no engine"), (("kernel_of_the_frontend",), "no plan named eng")):
        stand_in(*names)
        with pytest.raises(NotServedError, match=f"^sdpa: cudnn: {why}"):
            stage_of(make_problem()).check()


def test_it_is_never_the_default(stand_in):
    stand_in("eng4_k24=0")
    for target in GPU_TARGET_NAMES:
        plan = spec_plan(target=target)
        plan.check_support()
        assert plan._stages[0].engine != "cudnn"


def test_build_takes_samples_as_they_are(stand_in):
    stand_in("eng0")
    problem = make_problem(1, 3)
    modes = SdpaModes.of(
        SdpaGeometry(4, 2, 64), "fp16", has_gate=False, has_lse=False, has_seq_lens=False
    )
    specs = problem.plan()._specs
    plan = CudnnSdpa.build(modes, 0.5, [specs[n] for n in ("q", "k", "v", "o")], 0)
    assert plan.layouts["k"] == ((1, 3, 2, 64), (384, 128, 64, 1))
    assert str(plan) == "plan eng0"
