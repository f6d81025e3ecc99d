# SPDX-License-Identifier: Apache-2.0
"""Bundles on a GPU: the bits of compiled kernels, without the DSL, also when first run captured."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.harness.environment import ROOT
from benchmarks.time_to_first_result.bench import ARMS, COLD, DISK, FirstResultCase, spec_of
from benchmarks.time_to_first_result.cases import BUNDLE
from cudnn_blocks.artifacts import (
    CACHE_VARIABLE,
    DiskCache,
    build_bundle,
    bundle,
    load_bundle,
    refuse_compiles,
)
from cudnn_blocks.stages import kernel_stage
from cudnn_blocks.stages.bundle_store import second_level
from cudnn_blocks.stages.kernel_cache import KernelCache
from tests.helpers.conv1d_problem import make_problem
from tests.helpers.tensors import assert_same_bits

pytestmark = pytest.mark.gpu

NUM_PROCESSES = 16
BLOCK = {
    "op": "gated-attention-block",
    "d_model": 512,
    "h_q": 4,
    "h_kv": 2,
    "tokens": 256,
    "fuse_norm_rope": True,
    "fuse_gate": True,
}
CONV3D = {
    "op": "conv3d-rmsnorm-silu-pad",
    "frames": 4,
    "height": 34,
    "width": 34,
    "in_channels": 160,
    "out_channels": 160,
    "residual": "add",
}


@pytest.mark.timeout(400)  # seven fresh processes, three of which compile
@pytest.mark.parametrize("plan", [BLOCK, CONV3D], ids=["block", "conv3d"])
def test_a_fresh_process_gives_the_bits_of_a_cold_one(plan, tmp_path):
    runs = FirstResultCase("small", "small", plan).run_all(1, tmp_path, "cuda")
    cold, disk, bundled = (runs[arm][0] for arm in ARMS)
    assert (ARMS, cold["imports_dsl"], bundled["imports_dsl"]) == (
        (COLD, DISK, BUNDLE),
        True,
        False,
    )
    assert cold["sha256"] == disk["sha256"] == bundled["sha256"]
    assert cold["engines"] == bundled["engines"]


@pytest.mark.timeout(400)  # sixteen processes with a CUDA context each
def test_sixteen_cold_processes_compile_once_and_are_all_right(tmp_path):
    """Field case S27."""
    (request,) = FirstResultCase("small", "small", CONV3D).deploy.plans
    spec = {**spec_of(request), "device": "cuda", "bundle": None}
    command = [sys.executable, "-m", "benchmarks.time_to_first_result.child", json.dumps(spec)]
    environment = {**os.environ, CACHE_VARIABLE: str(tmp_path)}
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        for _ in range(NUM_PROCESSES)
    ]
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * NUM_PROCESSES
    assert len({json.loads(text)["sha256"] for text in said}) == 1
    (folder,) = tmp_path.iterdir()
    assert DiskCache(folder).stats().entries == 1


@pytest.mark.parametrize("captures", [False, True])
def test_a_bundled_kernel_gives_the_bits_of_the_compiled_one(captures, monkeypatch, tmp_path):
    monkeypatch.setattr(bundle, "_bundles", [])
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    problem = make_problem(64, 2048, device="cuda", activation="silu", has_bias=True)
    compiled, loaded = problem.clone(), problem.clone()
    build_bundle([problem.plan()], tmp_path / "model.cbb", progress=False)
    compiled.run()
    kernels = KernelCache(second_level)
    monkeypatch.setattr(kernel_stage, "KERNELS", kernels)
    load_bundle(tmp_path / "model.cbb")
    refuse_compiles()
    try:
        plan = loaded.compiled()
    finally:
        refuse_compiles(False)
    assert (kernels.stats().compiled, kernels.stats().loaded) == (0, 1)
    if captures:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loaded.execute(plan)
        graph.replay()
    else:
        loaded.execute(plan)
    torch.cuda.synchronize()
    for name in ("out", "conv_state"):
        assert_same_bits(getattr(loaded, name), getattr(compiled, name), name)
    with pytest.raises(ValueError, match="x"):
        loaded.execute(plan, x=problem.x[:, :8])
