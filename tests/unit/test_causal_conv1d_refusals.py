# SPDX-License-Identifier: Apache-2.0
"""Every way to misuse the causal conv1d update: the type, the message, and nothing written."""

from __future__ import annotations

import re

import pytest
import torch

from cudnn_blocks import (
    BadSlotError,
    CausalConv1dGeometry,
    CausalConv1dUpdate,
    ContractError,
    GradModeError,
    LifecycleError,
    NotServedError,
    check_status,
    ops,
)
from tests.helpers.conv1d_problem import ConvProblem, make_problem
from tests.helpers.tensors import assert_same_bits, clone_exact

N, D = 3, 8
BF16 = torch.bfloat16


def full_problem(device, **kw) -> ConvProblem:
    kw = {"indices": [2, -1, 0], "num_slots": 6, "on_bad_index": "report"} | kw
    return make_problem(N, D, device=device, has_bias=True, **kw)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element off an allocation's start."""
    base = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return base[1:].view(tensor.shape).copy_(tensor)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


def padded_columns(tensor: torch.Tensor, pitch: int) -> torch.Tensor:
    wide = torch.zeros(tensor.shape[0], pitch, dtype=tensor.dtype, device=tensor.device)
    return wide[:, : tensor.shape[1]].copy_(tensor)


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, dim=0)[::2]


BREAKS = {
    "x-dtype": ("x", lambda t: t.float(), "dtype torch.bfloat16", "torch.float32"),
    "x-other-half": ("x", lambda t: t.half(), "dtype torch.bfloat16", "torch.float16"),
    "x-vector": ("x", lambda t: t[0], "shape [N, 8]", "[8]"),
    "x-3d": ("x", lambda t: t.unsqueeze(2), "shape [N, 8]", "[3, 8, 1]"),
    "x-channels": ("x", lambda t: t[:, :4].contiguous(), "shape [N = 3, 8]", "axis 1 is 4, not 8"),
    "x-pitch-12": ("x", lambda t: padded_columns(t, 12), "ld % 8 == 0", "(12, 1)"),
    "x-columns": ("x", transposed, "strides (8, 1) or (ld, 1)", "(1, 3)"),
    "x-alignment": ("x", misaligned, "a 16-byte aligned address", "aligned to 2 bytes"),
    "state-dtype": ("conv_state", lambda t: t.half(), "dtype torch.bfloat16", "torch.float16"),
    "state-len": ("conv_state", lambda t: t[:, :, :3].contiguous(), "S = 6, 8, 4]", "axis 2 is 3"),
    "state-matrix": ("conv_state", lambda t: t[0], "shape [S, 8, 4]", "[8, 4]"),
    "state-stride": ("conv_state", every_second, "strides (32, 4, 1)", "(64, 4, 1)"),
    "state-channel-last-l4": (
        "conv_state",
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "strides (32, 4, 1)",
        "(32, 1, 8)",
    ),
    "state-alignment": ("conv_state", misaligned, "a 16-byte aligned address", "to 2 bytes"),
    "weight-width": ("weight", lambda t: t[:, :3].contiguous(), "shape [8, 4]", "axis 1 is 3"),
    "weight-dtype": ("weight", lambda t: t.float(), "dtype torch.bfloat16", "torch.float32"),
    "weight-stride": ("weight", transposed, "contiguous strides (4, 1)", "(1, 8)"),
    "weight-alignment": ("weight", misaligned, "a 16-byte aligned address", "to 2 bytes"),
    "out-rows": ("out", lambda t: t[:2], "shape [N = 3, 8]", "axis 0 is 2, not 3"),
    "out-dtype": ("out", lambda t: t.float(), "dtype torch.bfloat16", "torch.float32"),
    "out-pitch": ("out", lambda t: padded_columns(t, 16), "contiguous strides (8, 1)", "(16, 1)"),
    "out-alignment": ("out", misaligned, "a 16-byte aligned address", "to 2 bytes"),
    "bias-shape": ("bias", lambda t: t[:4], "shape [8]", "axis 0 is 4, not 8"),
    "bias-dtype": ("bias", lambda t: t.float(), "dtype torch.bfloat16", "torch.float32"),
    "bias-stride": ("bias", lambda t: t.repeat_interleave(2)[::2], "strides (1,)", "(2,)"),
    "bias-alignment": ("bias", misaligned, "a 16-byte aligned address", "to 2 bytes"),
    "bias-absent": ("bias", lambda _: None, "a tensor, as declared at construction", "None"),
    "indices-int64": ("conv_state_indices", lambda t: t.long(), "dtype torch.int32", "int64"),
    "indices-rows": ("conv_state_indices", lambda t: t[:2], "shape [N = 3]", "axis 0 is 2"),
    "indices-stride": (
        "conv_state_indices",
        lambda t: t.repeat_interleave(5)[::5],
        "contiguous strides (1,)",
        "(5,)",
    ),
    "indices-absent": ("conv_state_indices", lambda _: None, "a tensor, as declared", "None"),
    "status-shape": ("status", lambda t: t[:, :1].contiguous(), "[N = 3, 2]", "axis 1 is 1"),
    "status-dtype": ("status", lambda t: t.long(), "dtype torch.int32", "torch.int64"),
    "status-absent": ("status", lambda _: None, "a tensor, as declared at construction", "None"),
    "x-meta": ("x", lambda t: t.to("meta"), "a tensor on ", "meta"),
    "weight-meta": ("weight", lambda t: t.to("meta"), "a tensor on ", "meta"),
}


def assert_nothing_written(problem: ConvProblem, before: ConvProblem) -> None:
    for name, tensor in problem.operands.items():
        if tensor is not None:
            assert_same_bits(tensor, before.operands[name], name)


@pytest.mark.parametrize("case", BREAKS)
def test_execute_refuses_and_writes_nothing(device, case):
    name, break_, expected, got = BREAKS[case]
    problem = full_problem(device)
    plan, before = problem.compiled(), problem.clone()
    broken = break_(problem.operands[name])
    with pytest.raises(ContractError) as refused:
        problem.execute(plan, **{name: broken})
    error = refused.value
    assert error.operand == name
    assert expected in error.expected
    assert got in str(error.got)
    assert str(error) == f"{name}: expected {error.expected}, got {error.got}"
    assert_nothing_written(problem, before)
    problem.execute(plan)  # the plan and the device are none the worse


NOT_A_SAMPLE = ("absent", "meta", "status", "x-dtype", "x-other-half", "x-3d")
"""x fixes the dtype, 3-D x is a decline, and status has no sample."""


@pytest.mark.parametrize("case", [c for c in BREAKS if not any(n in c for n in NOT_A_SAMPLE)])
def test_check_support_says_the_same_of_samples(case):
    name, break_, expected, got = BREAKS[case]
    field = "indices" if name == "conv_state_indices" else name
    problem = full_problem("cpu")
    geometry = problem.geometry
    broken = problem.with_(**{field: break_(problem.operands[name])})
    plan = CausalConv1dUpdate(
        broken.x,
        broken.conv_state,
        broken.weight,
        broken.out,
        geometry,
        sample_bias=broken.bias,
        sample_conv_state_indices=broken.indices,
        on_bad_index="report",
    )
    with pytest.raises(ContractError) as refused:
        plan.check_support()
    assert refused.value.operand == name
    assert expected in refused.value.expected
    assert got in str(refused.value.got)


@pytest.mark.parametrize("name", ["bias", "conv_state_indices", "status"])
def test_supplied_but_not_declared(device, name):
    problem = make_problem(N, D, device=device, num_slots=6)
    plan, before = problem.compiled(), problem.clone()
    supplied = full_problem(device).operands[name]
    with pytest.raises(ContractError, match=f"^{name}: expected None, since it was not declared"):
        problem.execute(plan, **{name: supplied})
    assert_nothing_written(problem, before)


@pytest.mark.parametrize("name", ["x", "weight", "out", "bias", "conv_state_indices", "status"])
def test_the_state_overlaps_nothing(device, name):
    problem = full_problem(device)
    plan, before = problem.compiled(), clone_exact(problem.conv_state)
    operand = problem.operands[name]
    pool = problem.conv_state.view(-1)
    inside = pool[: operand.numel() * operand.element_size() // 2].view(operand.dtype)
    with pytest.raises(ContractError, match="overlapping byte ranges"):
        problem.execute(plan, **{name: inside.view(operand.shape)})
    assert_same_bits(problem.conv_state, before, "conv_state")


@pytest.mark.parametrize("name", ["x", "weight", "bias", "conv_state_indices"])
def test_the_output_overlaps_nothing(device, name):
    problem = full_problem(device)
    plan = problem.compiled()
    operand = problem.operands[name]
    memory = torch.zeros(4096, dtype=torch.uint8, device=device)
    shared = memory[: operand.numel() * operand.element_size()].view(operand.dtype)
    out = memory[: problem.out.numel() * 2].view(BF16).view(N, D)
    message = f"^out: expected memory of its own, since it is written, apart from {name}, got"
    with pytest.raises(ContractError, match=message):
        problem.execute(plan, **{name: shared.view(operand.shape), "out": out})
    assert not memory.any()


def test_in_place_is_refused(device):
    problem = make_problem(N, D, device=device)
    plan, before = problem.compiled(), clone_exact(problem.x)
    with pytest.raises(ContractError, match="^out: expected memory of its own"):
        problem.execute(plan, out=problem.x)
    assert_same_bits(problem.x, before, "x")


def test_operands_that_are_read_may_share_memory(device):
    """A weight row and the bias may well come from one packed parameter."""
    problem = make_problem(N, D, device=device, has_bias=True)
    problem.run().execute(problem.compiled(), bias=problem.x[0].contiguous())
    problem.execute(problem.compiled(), bias=problem.x[0])


def test_without_indices_there_is_a_slot_for_every_row(device):
    problem = make_problem(N, D, device=device, num_slots=N - 1)
    with pytest.raises(ContractError) as refused:
        problem.plan().check_support()
    assert str(refused.value) == (
        "conv_state: expected at least N = 3 slots without conv_state_indices, got 2 slots"
    )
    fits = make_problem(N, D, device=device)
    plan = fits.compiled()
    with pytest.raises(ContractError, match="^conv_state: expected at least N = 3 slots"):
        fits.execute(plan, conv_state=fits.conv_state[:2])


@pytest.mark.parametrize(("name", "symbol"), [("x", "N"), ("conv_state", "S")])
def test_more_than_the_sample_had(device, name, symbol):
    problem = make_problem(N, D, device=device, num_slots=6)
    plan = problem.compiled()
    larger = make_problem(N + 1, D, device=device, num_slots=7)
    changed = {"x": {"x": larger.x, "out": larger.out}, "conv_state": {}}[name]
    changed |= {"conv_state": larger.conv_state} if name == "conv_state" else {}
    with pytest.raises(ContractError, match=f"^{symbol}: expected at most ., the sample's, got"):
        problem.execute(plan, **changed)


@pytest.mark.parametrize("name", ["x", "conv_state", "weight", "out", "bias"])
def test_autograd_is_declined(device, name):
    problem = full_problem(device)
    plan, before = problem.compiled(), problem.clone()
    wants_grad = problem.operands[name].detach().clone().requires_grad_()
    with pytest.raises(GradModeError, match=f"^{name}: requires grad while grad mode is on"):
        problem.execute(plan, **{name: wants_grad})
    assert_nothing_written(problem, before)
    with torch.no_grad():
        problem.execute(plan, **{name: wants_grad})


def test_execute_before_compile(device):
    problem = full_problem(device)
    before = problem.clone()
    with pytest.raises(LifecycleError, match=r"execute\(\) before compile\(\); call compile\(\)"):
        problem.execute(problem.plan())
    assert_nothing_written(problem, before)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"activation": "gelu"}, ContractError, "activation: expected one of None, 'identity'"),
        ({"activation": 1}, ContractError, "activation: expected one of"),
        ({"on_bad_index": "ignore"}, ContractError, "on_bad_index: expected one of 'trap', 're"),
    ],
)
def test_knobs_out_of_range(changes, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        full_problem("cpu").with_(**changes).plan().check_support()


SAMPLES = ("x", "conv_state", "weight", "out", "bias", "conv_state_indices")


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_of_a_wrong_type(name):
    samples = {f"sample_{n}": torch.zeros(1) for n in SAMPLES} | {f"sample_{name}": [1.0]}
    with pytest.raises(TypeError, match=rf"^sample_{name}: expected a torch\.Tensor or Tensor"):
        CausalConv1dUpdate(**samples, geometry=CausalConv1dGeometry(D))


@pytest.mark.parametrize("name", ["x", "conv_state", "weight", "out", "bias"])
def test_execute_with_a_wrong_type(device, name):
    problem = full_problem(device)
    plan = problem.compiled()
    with pytest.raises(TypeError, match=rf"^{name}: expected a torch\.Tensor or TensorSpec, got"):
        problem.execute(plan, **{name: problem.operands[name].tolist()})


def test_a_geometry_of_a_wrong_type():
    samples = [torch.zeros(1)] * 4
    with pytest.raises(TypeError, match="^geometry: expected CausalConv1dGeometry, got int"):
        CausalConv1dUpdate(*samples, 8)


@pytest.mark.gpu
def test_a_stream_of_a_wrong_type():
    problem = full_problem("cuda")
    plan, before = problem.compiled(), problem.clone()
    with pytest.raises(TypeError, match="^current_stream: expected"):
        problem.execute(plan, current_stream="the fast one")
    assert_nothing_written(problem, before)


@pytest.mark.parametrize(
    ("width", "state_len", "missing"),
    [
        (5, 5, r"width=5 \(served: 2, 3, 4\)"),
        (5, 4, r"width=5 \(served: 2, 3, 4\)"),
        (1, 1, r"width=1 \(served: 2, 3, 4\)"),
        (4, 5, r"spare_tokens=2 \(served: 0, 1\)"),
        (2, 3, r"spare_tokens=2 \(served: 0, 1\)"),
    ],
)
def test_sizes_without_a_row_decline_and_say_what_is_served(device, width, state_len, missing):
    problem = make_problem(N, D, width, state_len, device=device)
    with pytest.raises(NotServedError, match=missing) as declined:
        problem.compiled()
    error = declined.value
    assert error.stage == "conv1d_update"
    assert "width 2, 3, 4; spare_tokens 0, 1; dtype bf16, fp16" in error.served
    before = problem.clone()
    with pytest.raises(NotServedError, match=missing):
        ops.causal_conv1d_update(problem.x, problem.conv_state, problem.weight)
    assert_nothing_written(problem, before)


@pytest.mark.parametrize("width", [3, 4])
def test_a_state_too_short_for_the_filter_breaks_the_contract(width):
    problem = make_problem(N, D, width, width - 2)
    with pytest.raises(
        ContractError, match=f"^state_len: expected at least width - 1 = {width - 1}"
    ):
        problem.plan().check_support()
    with pytest.raises(ContractError, match="^state_len: expected at least"):
        ops.causal_conv1d_update(problem.x, problem.conv_state, problem.weight)


def test_dtypes_outside_the_contract():
    problem = make_problem(N, D, dtype=torch.float32)
    with pytest.raises(
        ContractError, match=r"^x: expected dtype torch\.bfloat16 or torch\.float16"
    ):
        problem.plan().check_support()


def test_three_dimensional_x_declines():
    problem = make_problem(N, D)
    x = problem.x.unsqueeze(2)
    plan = problem.with_(x=x).plan()
    with pytest.raises(NotServedError, match=r"conv1d_update: 3-D x \[N, D, T\] is not served"):
        plan.check_support()
    with pytest.raises(NotServedError, match="3-D x"):
        ops.causal_conv1d_update(x, problem.conv_state, problem.weight)


def test_bad_slots_on_the_cpu_raise_and_write_nothing():
    problem = make_problem(N, D, indices=[0, 9, 0], num_slots=4)
    plan, before = problem.compiled(), problem.clone()
    with pytest.raises(BadSlotError, match=r"row 0: slot 0 \(duplicate\), row 1: slot 9 \(out of"):
        problem.execute(plan)
    assert_nothing_written(problem, before)


class TestCheckStatus:
    def test_clean(self, device):
        check_status(torch.zeros(3, 2, dtype=torch.int32, device=device))
        check_status(torch.zeros(0, 2, dtype=torch.int32, device=device))

    def test_names_rows_slots_and_kinds(self, device):
        status = torch.zeros(12, 2, dtype=torch.int32)
        status[1] = torch.tensor([1, -5])
        status[4] = torch.tensor([2, 99])
        status[7] = torch.tensor([3, 6])
        status = status.to(device)
        before = clone_exact(status)
        with pytest.raises(BadSlotError) as raised:
            check_status(status)
        assert raised.value.faults == [
            (1, -5, "below -1"),
            (4, 99, "out of range"),
            (7, 6, "duplicate"),
        ]
        assert "row 4: slot 99 (out of range)" in str(raised.value)
        assert_same_bits(status, before, "status")

    def test_a_long_list_is_cut(self):
        status = torch.full((20, 2), 3, dtype=torch.int32)
        with pytest.raises(BadSlotError, match="and 12 more"):
            check_status(status)

    @pytest.mark.parametrize("shape", [(3,), (3, 3), (3, 2, 1)])
    def test_shape(self, shape):
        with pytest.raises(ContractError, match=r"^status: expected int32 \[N, 2\], got"):
            check_status(torch.zeros(shape, dtype=torch.int32))

    def test_dtype(self):
        with pytest.raises(
            ContractError, match=r"^status: expected int32 \[N, 2\], got torch.int64"
        ):
            check_status(torch.zeros(3, 2, dtype=torch.int64))

    def test_type(self):
        with pytest.raises(TypeError, match="^status: expected .*Tensor, got list"):
            check_status([[0, 0]])


def test_indices_off_a_4_byte_boundary():
    problem = full_problem("cpu")
    plan, before = problem.compiled(), problem.clone()
    memory = bytearray(16)
    indices = torch.frombuffer(memory, dtype=torch.int32, count=N, offset=2)
    if indices.data_ptr() % 4 == 0:
        indices = torch.frombuffer(memory, dtype=torch.int32, count=N, offset=1)
    with pytest.raises(ContractError, match="^conv_state_indices: expected a 4-byte aligned addr"):
        problem.execute(plan, conv_state_indices=indices)
    assert_nothing_written(problem, before)
