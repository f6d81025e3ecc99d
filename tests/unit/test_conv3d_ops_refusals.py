# SPDX-License-Identifier: Apache-2.0
"""Every way to misuse the Conv3D ops: the type, the message, and nothing written."""

from __future__ import annotations

import itertools

import pytest
import torch

from cudnn_blocks import ContractError, Conv3dRaw
from tests.helpers.conv3d_forms import (
    BIAS_PAD,
    CAUSAL,
    CONV_KINDS,
    FORMS,
    KINDS,
    NORM,
    NORM_ONLY,
    NORM_PAD,
    RAW,
)
from tests.helpers.conv3d_problem import (
    Conv3dProblem,
    assert_close,
    assert_exact,
    full_problem,
    gapped,
    make_problem,
    shifted,
)
from tests.helpers.tensors import assert_same_bits

BF16 = torch.bfloat16
ALIGNMENT_BYTES = {(CAUSAL, "input"): 2, (CAUSAL, "previous"): 8}
"""Elsewhere 16."""


OPERANDS = [(kind, name) for kind in KINDS for name in FORMS[kind].op.operand_names]
operands = pytest.mark.parametrize(("kind", "name"), OPERANDS)


def assert_refused(problem: Conv3dProblem, match: str, **changes: object) -> None:
    plan, before = problem.compiled(), problem.clone()
    with pytest.raises(ContractError, match=match) as refused:
        problem.execute(plan, **changes)
    error = refused.value
    assert str(error) == f"{error.operand}: expected {error.expected}, got {error.got}"
    for name, tensor in problem.operands.items():
        if tensor is not None:
            assert_same_bits(tensor, before.operands[name], name)
    problem.execute(plan)  # the plan and the device are none the worse
    assert_matches(problem, before.expected())


def assert_matches(problem: Conv3dProblem, expected: dict[str, torch.Tensor]) -> None:
    """The reference engine bit for bit, a kernel within the contract's tolerance."""
    same = assert_close if problem["input"].is_cuda else assert_exact
    same(problem.written, expected)


def assert_refused_as_sample(problem: Conv3dProblem, match: str, **changes: object) -> None:
    with pytest.raises(ContractError, match=match):
        problem.with_(**changes).plan().check_support()
    assert problem.with_(**changes).plan().probe().decline_type == "ContractError"


@operands
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtype(device, kind, name, dtype):
    problem = full_problem(kind, device)
    broken = problem[name].to(dtype)
    match = f"^{name}: expected dtype torch.bfloat16, got {dtype}"
    assert_refused(problem, match, **{name: broken})
    assert_refused_as_sample(problem, match, **{name: broken})


@operands
def test_alignment(device, kind, name):
    problem = full_problem(kind, device)
    wanted = ALIGNMENT_BYTES.get((kind, name), 16)
    match = f"^{name}: expected a {wanted}-byte aligned address, got an address aligned to"
    for elements in (1, 4):
        moved = shifted(problem[name], elements)
        if elements * 2 % wanted:
            assert_refused(problem, match, **{name: moved})
            assert_refused_as_sample(problem, match, **{name: moved})
        else:
            expected = problem.expected()
            problem = problem.with_(**{name: moved})
            assert_matches(problem.run(), expected)


@operands
def test_layout(device, kind, name):
    problem = full_problem(kind, device)
    if (kind, name) == (CAUSAL, "input"):
        expected = problem.expected()
        assert_matches(problem.with_(input=gapped(problem[name])).run(), expected)
        return
    match = f"^{name}: expected contiguous strides"
    assert_refused(problem, match, **{name: gapped(problem[name])})
    assert_refused_as_sample(problem, match, **{name: gapped(problem[name])})
    if problem[name].dim() == 5:
        swapped = problem[name].transpose(2, 3).contiguous().transpose(2, 3)
        assert_refused(problem, match, **{name: swapped})


@operands
def test_extent(device, kind, name):
    """One less along every axis but those whose smaller extents are another legal call's."""
    problem = full_problem(kind, device)
    tensor = problem[name]
    for axis in range(tensor.dim()):
        short = tensor.narrow(axis, 0, tensor.shape[axis] - 1).contiguous()
        # A smaller input makes the first operand after it wrong; its channels are its own.
        is_dynamic = name == "input" and axis != (1 if kind == CAUSAL else 4)
        wrong = r"\w+" if is_dynamic else name
        assert_refused(problem, f"^{wrong}: expected shape", **{name: short})


@operands
def test_rank(kind, name):
    problem = full_problem(kind)
    for broken in (problem[name][0], problem[name].unsqueeze(0)):
        assert_refused(problem, f"^{name}: expected shape", **{name: broken})
        with pytest.raises(ContractError, match=f"^{name}: expected shape"):
            problem.with_(**{name: broken}).plan().check_support()


@operands
def test_missing_undeclared_and_elsewhere(device, kind, name):
    problem = full_problem(kind, device)
    assert_refused(problem, f"^{name}: expected a tensor, as declared", **{name: None})
    elsewhere = problem[name].to("meta")
    assert_refused(problem, f"^{name}: expected a tensor on {device.type}", **{name: elsewhere})
    if name not in FORMS[kind].op.required_names:
        bare = (
            make_problem(kind, device=device, has_padded_input=False)
            if kind == CAUSAL
            else (make_problem(kind, device=device, residual="none" if kind != BIAS_PAD else "add"))
        )
        assert_refused(
            bare, f"^{name}: expected None, since it was not declared", **{name: problem[name]}
        )


@operands
def test_not_a_tensor(kind, name):
    problem = full_problem(kind)
    plan = problem.compiled()
    with pytest.raises(TypeError, match=rf"^{name}: expected a torch\.Tensor or TensorSpec, got"):
        problem.execute(plan, **{name: [1.0]})
    with pytest.raises(TypeError, match=rf"^sample_{name}: expected a torch\.Tensor or TensorSpec"):
        problem.with_(**{name: [1.0]}).plan()


WRITTEN = [
    (kind, written, name)
    for kind in KINDS
    for written, name in itertools.product(
        sorted(FORMS[kind].op.written_names), FORMS[kind].op.operand_names
    )
    if written != name
]


@pytest.mark.parametrize(("kind", "written", "name"), WRITTEN)
def test_a_written_operand_overlaps_nothing(device, kind, written, name):
    problem = full_problem(kind, device)
    sizes = {n: problem[n].numel() for n in (written, name)}
    memory = torch.full((max(sizes.values()),), torch.nan, dtype=BF16, device=device)
    shared = {n: memory[: sizes[n]].view(problem[n].shape) for n in sizes}
    match = r"^\w+: expected memory of its own, since it is written, apart from \w+, got overlap"
    assert_refused(problem, match, **shared)
    assert memory.isnan().all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (RAW, CAUSAL)])
def test_operands_that_are_read_may_share_memory(kind):
    problem = full_problem(kind)
    read = [n for n, t in problem.operands.items() if t is not None and n not in problem.written]
    vectors = [n for n in read if problem[n].dim() == 1]
    shared = dict.fromkeys(vectors, problem[vectors[0]])
    problem = problem.with_(**shared)
    expected = problem.expected()
    assert_exact(problem.run().written, expected)


@pytest.mark.parametrize("kind", CONV_KINDS)
@pytest.mark.parametrize(
    "shape",
    [
        (24, 3, 3, 3, 16),
        (24, 3, 3, 3, 128),
        (24, 1, 3, 3, 64),
        (24, 3, 1, 1, 64),
        (24, 5, 5, 5, 64),
        (24, 27, 64),
        (24, 27 * 64),
        (0, 3, 3, 3, 64),
    ],
)
def test_a_weight_that_is_not_packed_or_not_3x3x3(kind, shape):
    problem = full_problem(kind)
    broken = torch.zeros(shape, dtype=BF16)
    match = "^packed_weight: expected" if 0 not in shape else "^out_channels: expected"
    with pytest.raises(ContractError, match=match):
        problem.with_(packed_weight=broken).plan().check_support()
    with pytest.raises(ContractError, match=match):
        problem.call(packed_weight=broken)
    assert_refused(problem, "^packed_weight: expected shape", packed_weight=broken)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unpacked_checkpoint_weight(kind):
    problem = full_problem(kind)
    if kind == NORM_ONLY:
        return
    unpacked = torch.zeros(24, 16, 3, 3, 3, dtype=BF16)
    with pytest.raises(ContractError, match="^packed_weight: expected shape"):
        problem.call(packed_weight=unpacked)


@pytest.mark.parametrize("kind", CONV_KINDS)
@pytest.mark.parametrize("axis", [1, 2, 3])
def test_valid_convolutions_need_three_of_everything(kind, axis):
    problem = full_problem(kind)
    short = problem["input"].narrow(axis, 0, 2).contiguous()
    match = r"^input: expected shape \[N, T, H, W, 16\] with T, H, W >= 3, got"
    assert_refused(problem, match, input=short)
    assert_refused_as_sample(problem, match, input=short)
    with pytest.raises(ContractError, match=match):
        problem.call(input=short)


@pytest.mark.parametrize("kind", [CAUSAL, NORM_ONLY])
@pytest.mark.parametrize("axis", [-3, -2, -1])
def test_the_others_need_one(kind, axis):
    problem = full_problem(kind)
    axis = axis - 1 if kind == NORM_ONLY else axis
    empty = problem["input"].narrow(axis, 0, 0).contiguous()
    match = "^input: expected shape .* with T, H, W >= 1, got"
    assert_refused(problem, match, input=empty)
    with pytest.raises(ContractError, match=match):
        problem.call(input=empty)


@pytest.mark.parametrize("channels", [1, 3, 11, 13, 16])
def test_the_causal_convolution_takes_12_channels(channels):
    problem = make_problem(CAUSAL)
    n, _, t, h, w = problem["input"].shape
    other = torch.zeros(n, channels, t, h, w, dtype=BF16)
    assert_refused(problem, r"^input: expected shape \[N = 2, 12, T", input=other)
    assert_refused_as_sample(problem, r"^input: expected shape \[N = 2, 12, T", input=other)
    with pytest.raises(ContractError, match=r"^input: expected shape \[N, 12, T, H, W\]"):
        problem.call(input=other)


@pytest.mark.parametrize("kind", [CAUSAL, NORM_ONLY])
@pytest.mark.parametrize("change", [(1, 1), (1, 3), (2, 5), (3, 6), (0, 1), (4, 11)])
def test_history_of_another_size(kind, change):
    """S11: another resolution, batch, depth or number of frames."""
    axis, extent = change
    problem = full_problem(kind)
    shape = list(problem["previous"].shape)
    shape[axis] = extent
    other = torch.zeros(shape, dtype=BF16)
    assert_refused(problem, "^previous: expected shape", previous=other)
    if change == (1, 1):
        return  # one frame is a legal history of another call
    with pytest.raises(ContractError, match="^previous: expected shape"):
        problem.call(previous=other)
    assert_refused_as_sample(problem, "^previous: expected shape", previous=other)


@pytest.mark.parametrize("kind", [NORM, NORM_PAD])
def test_a_residual_and_its_output_come_together(kind):
    problem = full_problem(kind)
    for absent, match in (
        ({"residual": None, "residual_bias": None}, "^residual_output: expected None without a re"),
        ({"residual": None}, "^residual_bias: expected None without a residual"),
        ({"residual_output": None}, "^residual_output: expected a tensor where a residual"),
    ):
        assert_refused_as_sample(problem, match, **absent)


def test_a_pinned_stage_that_does_not_exist():
    problem = make_problem(RAW)
    with pytest.raises(ContractError, match=r"^engines: expected stage names among \['conv3d'\]"):
        problem.plan(engines={"conv": "portable"}).check_support()


def test_samples_on_two_devices():
    problem = make_problem(RAW)
    with pytest.raises(ContractError, match="^packed_weight: expected a tensor on cpu"):
        problem.with_(packed_weight=problem["packed_weight"].to("meta")).plan().check_support()


def test_a_keyword_that_is_not_there():
    with pytest.raises(TypeError, match="unexpected keyword argument 'geometry'"):
        Conv3dRaw(*[torch.zeros(1)] * 3, geometry=None)
