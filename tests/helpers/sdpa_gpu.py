# SPDX-License-Identifier: Apache-2.0
"""Attention plans on the GPU at hand: each engine by name, and problems on guarded outputs."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from cudnn_blocks import SdpaFwd
from cudnn_blocks.target import Target
from tests.helpers.sdpa_problem import (
    WRITTEN,
    SdpaProblem,
    assert_matches,
    make_problem,
    spec_plan,
)
from tests.helpers.tensors import guarded_copy

CUDA = torch.device("cuda", 0)
HAS_HOPPER = not torch.cuda.is_available() or torch.cuda.get_device_capability(0) == (9, 0)
"""A machine without a GPU collects what an H200 would run."""
ENGINES = ("hopper", "portable") if HAS_HOPPER else ("portable",)
D_HEADS = (64, 128, 256)
LARGEST = (4, 8192, 8192)
"""B, S and Sk of the samples."""


@functools.cache
def _plan(engine: str, options: tuple[tuple[str, Any], ...]) -> SdpaFwd:
    target = Target.of_device(CUDA).name
    plan = spec_plan(*LARGEST, target=target, engines={"sdpa": engine}, **dict(options))
    plan.compile()
    return plan


def compiled_plan(engine: str, **options: Any) -> SdpaFwd:
    """A compiled plan of one engine for every call up to ``LARGEST``; options of ``spec_plan``."""
    return _plan(engine, tuple(options.items()))


def plan_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``spec_plan`` that serve a problem made with these options."""
    kept = {n: v for n, v in options.items() if n not in ("seq_lens", "is_slab")}
    return {
        **kept,
        "has_lse": options.get("has_lse", True),
        "has_seq_lens": options.get("seq_lens") is not None,
    }


def guarded(problem: SdpaProblem) -> tuple[SdpaProblem, dict[str, Any]]:
    """The problem with written operands between guards, and the guards by name."""
    given = {n: problem[n] for n in WRITTEN if problem.operands[n] is not None}
    copies = {name: guarded_copy(tensor) for name, tensor in given.items()}
    moved = problem.with_(**{name: copy for name, (copy, _) in copies.items()})
    return moved, {name: buffer for name, (_, buffer) in copies.items()}


def check(engine: str, b: int, s: int, sk: int | None = None, **options: Any) -> SdpaProblem:
    """Makes a problem, runs it on guarded outputs, compares with the reference, returns it."""
    problem = make_problem(b, s, sk, device=CUDA, **options)
    what = f"{engine} B={b} S={s} Sk={sk} {options}"
    return check_problem(engine, problem, plan_options(options), what)


def check_problem(
    engine: str, problem: SdpaProblem, options: Mapping[str, Any], what: str
) -> SdpaProblem:
    """Runs a problem on guarded outputs and compares with the reference."""
    actual, buffers = guarded(problem)
    actual.run(compiled_plan(engine, **options))
    torch.cuda.synchronize()
    for name, buffer in buffers.items():
        assert buffer.is_intact(), f"{what}: written outside {name}"
    assert_matches(actual, problem.expected(), what)
    return actual
