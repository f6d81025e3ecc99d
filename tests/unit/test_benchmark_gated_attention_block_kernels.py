# SPDX-License-Identifier: Apache-2.0
"""Kernels that the gated attention benchmark compiles ahead: those that its arms ask for."""

from __future__ import annotations

import pickle

import pytest

from benchmarks.gated_attention_block import BENCH, bench, ours
from benchmarks.gated_attention_block.bench import BlockCase, HostCase
from benchmarks.harness.precompile import kernels_of
from cudnn_blocks.blocks import gated_attention_launch
from cudnn_blocks.stages.kernel_cache import KERNELS, CompiledKernel
from cudnn_blocks.target import Target

TARGET = Target.parse("sm_90a")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(bench, "_target", lambda: TARGET)
    monkeypatch.setattr(KERNELS, "_kernels", {})  # what other tests have compiled is not listed


@pytest.mark.parametrize("case", BENCH.cases, ids=lambda one: f"{one.kinds[0]}/{one.label}")
def test_every_plan_is_served_and_its_kernels_travel(hopper, case):
    plans = case.plans()
    assert plans
    for plan in plans:
        found = kernels_of([plan])
        assert {target for _, target in found} == {"sm_90a"}
        for build in found.values():
            assert pickle.loads(pickle.dumps(build)) == build


def test_a_block_asks_for_the_launcher_that_is_compiled_ahead(hopper, monkeypatch):
    class Asked:
        keys: list[object] = []  # noqa: RUF012

        def get(self, key, build):
            self.keys.append(key)
            return CompiledKernel(lambda *_: None)

    asked = Asked()
    blocks = [case for case in BENCH.cases if isinstance(case, (BlockCase, HostCase))]
    for case in blocks[:3]:
        sample = case.problem.make_set("meta")
        for variant, ahead in zip(case.VARIANTS, case.plans(), strict=True):
            listed = list(kernels_of([ahead]))
            asked.keys.clear()
            with monkeypatch.context() as patch:
                patch.setattr(gated_attention_launch, "KERNELS", asked)
                ours.block_plan(case.problem, sample, variant, TARGET).compile()
            assert asked.keys == listed
