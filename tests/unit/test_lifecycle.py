# SPDX-License-Identifier: Apache-2.0
"""APIBase: sealed verbs, order of calls, what each verb answers and refuses."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cudnn_blocks import (
    APIBase,
    CaptureError,
    ContractError,
    CudaUnavailableError,
    GradModeError,
    LifecycleError,
    NotServedError,
    TensorSpec,
    api_base,
)
from cudnn_blocks.operands import OperandTable
from tests.helpers.toy_op import WORKSPACE_BYTES, ToyGeometry, ToyOp, make_toy

NUM_THREADS = 8


def workspace() -> torch.Tensor:
    raw = torch.zeros(WORKSPACE_BYTES + 256, dtype=torch.uint8)
    start = -raw.data_ptr() % 256
    return raw[start : start + WORKSPACE_BYTES]


def compiled_toy(**kw) -> ToyOp:
    plan = make_toy(**kw)
    plan.compile()
    return plan


@pytest.mark.parametrize(
    "verb", ["check_support", "compile", "get_workspace_size", "probe", "describe", "__call__"]
)
def test_verbs_are_sealed(verb):
    with pytest.raises(TypeError, match=f"Naughty overrides sealed verbs: {verb}"):
        type("Naughty", (ToyOp,), {verb: lambda self: None})


def test_the_base_cannot_be_built():
    with pytest.raises(TypeError, match="abstract"):
        APIBase({}, None)


def test_a_subclass_of_an_op_that_seals_nothing_is_fine():
    assert issubclass(type("Nice", (ToyOp,), {"extra": 1}), ToyOp)


def test_the_life_of_a_plan():
    plan = make_toy()
    assert plan.check_support() is True
    assert plan.get_workspace_size() == WORKSPACE_BYTES
    plan.compile()
    x, out = torch.arange(16.0).view(2, 8), torch.zeros(2, 8)
    plan.execute(x, out, workspace())
    assert torch.equal(out, x * 2)


def test_call_compiles_then_executes():
    plan, x, out = make_toy(), torch.ones(1, 8), torch.zeros(1, 8)
    plan(x, out, workspace())
    plan(x, out, workspace())
    assert torch.equal(out, x * 2)
    assert plan._stages[0].compiles == 1


def test_workspace_size_is_legal_first():
    assert make_toy().get_workspace_size() == WORKSPACE_BYTES


def test_execute_before_compile():
    plan, out = make_toy(), torch.zeros(1, 8)
    with pytest.raises(LifecycleError, match=r"toy: execute\(\) before compile\(\); call compile"):
        plan.execute(torch.ones(1, 8), out, workspace())
    assert not out.any()


def test_execute_cold_in_a_capture(monkeypatch):
    plan = make_toy()
    monkeypatch.setattr(api_base, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match=r"capture is running; call compile\(\)"):
        plan.execute(torch.ones(1, 8), torch.zeros(1, 8), workspace())


def test_compile_in_a_capture(monkeypatch):
    plan = make_toy(device="meta", target="sm_90a")
    monkeypatch.setattr(api_base, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match="is not compiled and a CUDA graph capture is running"):
        plan.compile()
    monkeypatch.setattr(api_base, "is_capturing", lambda: False)
    plan.compile()
    monkeypatch.setattr(api_base, "is_capturing", lambda: True)
    plan.compile()


def test_a_cpu_plan_compiles_whatever_the_gpu_does(monkeypatch):
    monkeypatch.setattr(api_base, "is_capturing", lambda: True)
    make_toy().compile()


def test_compile_is_idempotent_and_thread_safe():
    plan, barrier = make_toy(), threading.Barrier(NUM_THREADS)

    def compile_(_):
        barrier.wait(20)
        plan.compile()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(compile_, range(NUM_THREADS)))
    assert plan._stages[0].compiles == 1


def test_compile_runs_the_support_check():
    with pytest.raises(NotServedError, match="double: reference: columns=1"):
        make_toy(columns=1).compile()


@pytest.mark.parametrize(
    ("buffer", "got"),
    [
        (None, "None"),
        (torch.zeros(WORKSPACE_BYTES - 1, dtype=torch.uint8), "511 bytes"),
        (torch.zeros(WORKSPACE_BYTES, dtype=torch.int8), r"torch\.int8"),
        (torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="meta"), "meta"),
    ],
)
def test_a_bad_workspace_is_refused_before_anything_is_written(buffer, got):
    plan, out = compiled_toy(), torch.zeros(1, 8)
    with pytest.raises(ContractError, match=f"^workspace: expected 512 bytes .*, got .*{got}"):
        plan.execute(torch.ones(1, 8), out, buffer)
    assert not out.any()


def test_a_workspace_that_overlaps_an_operand_is_refused():
    plan = compiled_toy()
    memory = workspace()
    out = memory[:32].view(torch.float32).view(1, 8)
    with pytest.raises(ContractError, match="^workspace: .* apart from out, got overlap"):
        plan.execute(torch.ones(1, 8), out, memory)
    assert not memory.any()


class Counting(OperandTable):
    """Counts the calls that are checked in full."""

    checked = 0

    def check_call(self, *args):
        Counting.checked += 1
        return super().check_call(*args)


@pytest.fixture
def counted(monkeypatch):
    """A compiled plan, and how many calls it has checked."""
    plan = compiled_toy()
    plan._operands = Counting(plan._operands.operands, plan._operands.derive)
    monkeypatch.setattr(Counting, "checked", 0)
    return plan, lambda: Counting.checked


def test_a_call_that_looks_like_one_that_passed_is_not_checked_again(counted):
    plan, checked = counted
    x, out, room = torch.ones(2, 8), torch.zeros(2, 8), workspace()
    for _ in range(3):
        plan.execute(x, out, room)
    assert checked() == 1
    plan.execute(x[:1], out[:1], room)
    plan.execute(x, out, workspace())
    plan.execute(x, torch.zeros(2, 8), room)
    assert checked() == 4
    plan.execute(x[:1], out[:1], room)
    assert checked() == 4
    assert torch.equal(out, x * 2)


def test_a_call_that_passed_hides_no_fault_of_another(counted):
    plan, _ = counted
    x, out, room = torch.ones(2, 8), torch.zeros(2, 8), workspace()
    plan.execute(x, out, room)
    faults = [
        (x, x, room),
        (x.view(torch.int32), out, room),
        (x.view(8, 2), out, room),
        (x.T.contiguous().T, out, room),
        (x, None, room),
        (x, out, None),
        (x, out, room[:-1]),
        (x, out, x.view(torch.uint8).view(-1)),
    ]
    for fault in faults:
        with pytest.raises(ContractError):
            plan.execute(*fault)
    with pytest.raises(TypeError, match="x"):
        plan.execute([1.0], out, room)
    with pytest.raises(GradModeError, match="x"):
        plan.execute(x.requires_grad_(), out, room)
    with torch.no_grad():
        plan.execute(x, out, room)


def test_calls_that_passed_keep_no_tensor_alive_and_are_bounded(counted, monkeypatch):
    plan, _ = counted
    monkeypatch.setattr(api_base, "MAX_PASSED", 3)
    x, room = torch.ones(2, 8), workspace()
    outs = [torch.zeros(2, 8) for _ in range(9)]
    for out in outs:
        plan.execute(x, out, room)
        assert 0 < len(plan._passed) <= 3
    last = weakref.ref(outs[-1])
    del outs, out
    assert last() is None


def test_extents_up_to_the_samples():
    plan = compiled_toy(rows=3)
    for rows in (0, 1, 3):
        out = torch.zeros(rows, 8)
        plan.execute(torch.ones(rows, 8), out, workspace())
        assert bool((out == 2).all())
    with pytest.raises(ContractError, match="^N: expected at most 3, the sample's, got 4$"):
        plan.execute(torch.ones(4, 8), torch.zeros(4, 8), workspace())


def test_samples_on_two_devices():
    plan = ToyOp(torch.ones(1, 8), torch.empty(1, 8, device="meta"), ToyGeometry(8), target="cpu")
    with pytest.raises(ContractError, match="^out: expected a tensor on cpu, as x, got meta$"):
        plan.check_support()


def test_a_sample_may_be_a_spec_or_meta():
    spec = TensorSpec.contiguous((3, 8), torch.float32)
    for sample in (spec, torch.empty(3, 8, device="meta")):
        plan = ToyOp(sample, sample, ToyGeometry(8), target="sm_90a")
        assert plan.check_support()
        assert plan.get_workspace_size() == WORKSPACE_BYTES


def test_samples_on_meta_need_a_target():
    with pytest.raises(ContractError, match="or target= when the samples are on meta"):
        make_toy(device="meta").check_support()


def test_cuda_samples_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = TensorSpec.contiguous((3, 8), torch.float32, "cuda:0")
    plan = ToyOp(spec, spec, ToyGeometry(8))
    with pytest.raises(CudaUnavailableError, match="torch sees no CUDA device"):
        plan.check_support()


def test_a_plan_for_a_gpu_refuses_cpu_tensors():
    plan = compiled_toy(device="meta", target="sm_90a")
    with pytest.raises(ContractError, match="^x: expected a tensor on a sm_90a GPU, got cpu$"):
        plan.execute(torch.ones(1, 8), torch.zeros(1, 8), workspace())


@pytest.mark.parametrize("target", [90, b"cpu", object()])
def test_targets_of_a_wrong_type(target):
    with pytest.raises(TypeError, match="^target: expected str or Target, got"):
        make_toy(target=target)


def test_an_unknown_target():
    with pytest.raises(ContractError, match="^target: expected one of cpu, sm_80,"):
        make_toy(target="sm_20").check_support()


def test_a_pin_of_a_stage_that_is_not_there():
    with pytest.raises(ContractError, match=r"^engines: expected stage names among \['double'\]"):
        make_toy(engines={"nothing": "fast"}).check_support()


def test_a_pinned_engine_that_cannot_serve_declines():
    with pytest.raises(NotServedError, match=r"double: fast: target=cpu \(served: sm_90a\)"):
        make_toy(engines={"double": "fast"}).check_support()


def test_describe_names_the_engine_and_the_map():
    assert make_toy().describe().splitlines() == [
        "toy on cpu: ToyGeometry(columns=8)",
        "  double: reference (compile-only) one multiplication",
        "workspace: 512 bytes",
        "             0            32  doubled",
        "           256             8  engine_scratch",
    ]


def test_samples_are_not_retained():
    import gc
    import weakref

    x = torch.ones(3, 8)
    plan = ToyOp(x, x.clone(), ToyGeometry(8))
    plan.compile()
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None
