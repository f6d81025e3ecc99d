# SPDX-License-Identifier: Apache-2.0
"""Conv3D plans on the GPU at hand: each engine by name, each tile by the samples that choose it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cudnn_blocks.target import Target
from tests.helpers.conv3d_forms import BIAS_PAD, CAUSAL, NORM_ONLY, NORM_PAD, RAW
from tests.helpers.conv3d_problem import Conv3dProblem, assert_close, make_problem, spec_plan
from tests.helpers.tensors import assert_same_bits, guarded_copy

CUDA = torch.device("cuda", 0)
HAS_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability(0) == (9, 0)
"""A machine without a GPU collects what an H200 would run."""
ENGINES = ("hopper", "portable") if HAS_HOPPER else ("portable",)

SMALL, TALL, LARGE = (2, 4, 33, 33), (2, 7, 88, 160), (2, 8, 352, 640)
"""Extents of samples; with 132 SMs the hopper convolution takes 16x8, 32x8 and 16x16 tiles."""
ODD_SITES = (
    (2, 1, 1, 1),
    (1, 3, 2, 31),
    (1, 2, 31, 3),
    (2, 2, 5, 15),
    (1, 4, 15, 2),
    (1, 1, 3, 5),
    (1, 2, 31, 31),
)
"""Results of inputs whose H and W are in {3, 4, 5, 7, 17, 33}."""
_STAGES = {NORM_ONLY: "rmsnorm_silu_pad", CAUSAL: "causal_conv3d"}


def compiled_plan(
    kind: str,
    engine: str,
    channels: tuple[int, int] = (160, 160),
    tile_sites: tuple[int, int, int, int] = SMALL,
    **options: Any,
) -> Any:
    """A compiled plan of one engine whose tile is the one for ``tile_sites``."""
    target = Target.of_device(CUDA).name
    engines = {_STAGES.get(kind, "conv3d"): engine}
    plan = spec_plan(kind, channels, tile_sites, target=target, engines=engines, **options)
    plan.compile()
    return plan


def guarded(problem: Conv3dProblem) -> tuple[Conv3dProblem, list[Any]]:
    """Written operands between guards, and the guards."""
    copies = {name: guarded_copy(tensor) for name, tensor in problem.written.items()}
    return problem.with_(**{n: copy for n, (copy, _) in copies.items()}), [
        buffer for _, buffer in copies.values()
    ]


def frame_mask(problem: Conv3dProblem, name: str) -> torch.Tensor:
    """Positions of a padded tensor that hold no activation: borders and planes before the clip."""
    mask = torch.ones(problem[name].shape[:4], dtype=torch.bool, device=CUDA)
    if problem.kind == BIAS_PAD:
        mask[:, :, :-1, :-1] = False
    else:
        mask[:, 2:, 1:-1, 1:-1] = False
    return mask


def check(problem: Conv3dProblem, plan: Any, *, is_exact: bool, what: str) -> None:
    """Runs on guarded outputs and compares with the reference.

    Sums are exact on integer data, and then so is everything before the norm. Borders, missing
    planes and history are exact always.
    """
    expected = problem.expected()
    problem, buffers = guarded(problem)
    problem.execute(plan)
    torch.cuda.synchronize()
    for name, buffer in zip(problem.written, buffers, strict=True):
        assert buffer.is_intact(), f"{what}: written outside {name}"
    actual = problem.written
    assert_close(actual, expected, what)
    if "padded_output" in expected:
        mask = frame_mask(problem, "padded_output")
        around = {
            name: tensors["padded_output"][mask]
            for name, tensors in (("got", actual), ("wanted", expected))
        }
        assert_same_bits(around["got"], around["wanted"], f"{what} around padded_output")
    exact = {"padded_input", "cache_output"} if problem.kind == CAUSAL else set()
    if is_exact:
        exact |= {"residual_output"}
        if problem.kind in (RAW, BIAS_PAD, CAUSAL):
            exact |= {"output", "padded_output"}
    for name in exact & set(expected):
        assert_same_bits(actual[name], expected[name], f"{what} {name}")


def odd_problems(
    kind: str, channels: tuple[int, int], **options: Any
) -> Iterator[tuple[str, bool, Conv3dProblem]]:
    """A description, whether sums are exact, and the problem, for all sizes and kinds of data."""
    for sites in ODD_SITES:
        for data in ("integers", "normal"):
            problem = make_problem(kind, sites, channels, device=CUDA, data=data, **options)
            yield f"{data} {sites}", data == "integers", problem


def frames_of(problem: Conv3dProblem, first: int, count: int) -> Conv3dProblem:
    """The same call on ``count`` frames from ``first`` on; valid convolutions without caches."""
    assert problem.kind != NORM_PAD
    sliced = {}
    for name, tensor in problem.operands.items():
        if tensor is not None and tensor.dim() == 5 and name != "packed_weight":
            halo = 2 if name == "input" else 0
            tensor = tensor[:, first : first + count + halo].contiguous()
        sliced[name] = tensor
    return problem.with_(**sliced)
