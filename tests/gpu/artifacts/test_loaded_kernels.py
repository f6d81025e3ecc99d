# SPDX-License-Identifier: Apache-2.0
"""Kernels from the disk cache: the bits of compiled ones, also when first run in a capture."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks.artifacts import CACHE_VARIABLE
from cudnn_blocks.stages import kernel_stage
from cudnn_blocks.stages.kernel_cache import KernelCache
from cudnn_blocks.stages.kernel_store import disk_store
from tests.helpers.conv1d_problem import make_problem
from tests.helpers.tensors import assert_same_bits

pytestmark = pytest.mark.gpu


@pytest.fixture
def caches(monkeypatch, tmp_path):
    """Starts a fresh kernel cache over one disk cache, as another process would."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))

    def fresh() -> KernelCache:
        kernels = KernelCache(disk_store)
        monkeypatch.setattr(kernel_stage, "KERNELS", kernels)
        return kernels

    return fresh


@pytest.mark.parametrize("captures", [False, True])
def test_a_loaded_kernel_gives_the_bits_of_the_compiled_one(caches, captures):
    problem = make_problem(64, 2048, device="cuda", activation="silu", has_bias=True)
    compiled, loaded = problem.clone(), problem.clone()
    kernels = caches()
    compiled.run()
    assert kernels.stats().compiled == 1
    kernels = caches()
    plan = loaded.compiled()
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


def test_a_bad_call_of_a_loaded_kernel_is_refused_as_ever(caches):
    problem = make_problem(64, 2048, device="cuda")
    caches()
    problem.clone().run()
    caches()
    plan = problem.compiled()
    with pytest.raises(ValueError, match="x"):
        problem.execute(plan, x=problem.x[:, :8])
