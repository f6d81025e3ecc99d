# SPDX-License-Identifier: Apache-2.0
"""The block's one host call holds the stages' own kernels, compiled as the stages compile them.

By default one pipeline on Hopper and one elsewhere; ``--all-targets`` takes two everywhere, and
every knob on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cudnn_blocks import GatedAttentionGeometry
from cudnn_blocks.blocks.gated_attention_launch import can_launch_at_once, compiled_launcher
from cudnn_blocks.target import GPU_TARGET_NAMES
from tests.codegen.cubin_sass import kernels_of
from tests.codegen.cubin_usage import usage_of
from tests.conftest import SUMMARY_LINE
from tests.helpers.gated_attention_problem import KNOBS, make_problem

D64 = GatedAttentionGeometry(d_model=128, h_q=4, h_kv=2, d_head=64, rope_dim=16)
D256 = GatedAttentionGeometry(d_model=2048, h_q=16, h_kv=2, d_head=256, rope_dim=64)
BARE = GatedAttentionGeometry(
    d_model=128, h_q=2, h_kv=1, d_head=128, rope_dim=128, qk_norm=False, window_left=30
)


@dataclass(frozen=True)
class Case:
    """One block; ``targets`` are those of a default run."""

    geometry: GatedAttentionGeometry
    targets: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"D={self.geometry.d_head}", f"rope={self.geometry.rope_dim}"]
        parts += [f"{name}={value}" for name, value in self.options.items() if value]
        return " ".join(parts).replace("torch.", "")


EXTRAS = {"seq_lens": [8, 8], "has_lse": True, "dtype": torch.float16}
CASES = [
    Case(D64, ("sm_90a",), {**EXTRAS, **KNOBS[0]}),
    Case(D64, ("sm_80",), KNOBS[3]),
]
EVERY = [
    Case(D256, GPU_TARGET_NAMES, KNOBS[3]),
    Case(BARE, GPU_TARGET_NAMES, {**EXTRAS, **KNOBS[1]}),
    *(Case(D256, ("sm_90a",), {**EXTRAS, **knobs}) for knobs in KNOBS),
]


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        everything = CASES + EVERY * metafunc.config.getoption("--all-targets")
        chosen = [(case, target) for case in everything for target in case.targets]
        ids = [f"{target}-{case}".replace(" ", "-") for case, target in chosen]
        metafunc.parametrize(("case", "target"), chosen, ids=ids)


@pytest.mark.timeout(300)  # every kernel twice, half a minute each on a busy machine
def test_the_one_call_holds_the_stages_own_kernels(case, target, tmp_path, record_property):
    plan = make_problem(case.geometry, 2, 8, **case.options).to("meta").plan(target=target)
    plan.check_support()
    stages = plan._stages
    assert can_launch_at_once(stages)
    facts = (plan.geometry, plan._presence, plan._wiring.dtype, plan.target)
    cubin = compiled_launcher(stages, *facts, keep_cubin=True).cubin
    held, resources = kernels_of(cubin, tmp_path), usage_of(cubin, tmp_path)
    assert len(held) == len(resources) == len(stages)
    total = sum(kernel.stack_bytes for kernel in resources)
    record_property(SUMMARY_LINE, f"{target:8} block {case}: {len(held)} kernels, {total} stack B")
    for stage in stages:
        (own,) = kernels_of(stage.compiled_kernel(keep_cubin=True).cubin, tmp_path)
        assert own in held, f"{stage.name} is another kernel inside the one call"
