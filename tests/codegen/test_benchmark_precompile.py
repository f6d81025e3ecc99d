# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead of a benchmark arrive in the cache that plans look into."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from benchmarks.harness import precompile as ahead
from cudnn_blocks import Conv3dRmsNormSiluPad, RmsNormSiluPad, TensorSpec
from cudnn_blocks.stages.kernel_cache import KERNELS, CompiledKernel
from cudnn_blocks.stages.kernel_store import load_kernel


def norm(channels: int, target: str = "sm_90a", frames: int = 1) -> RmsNormSiluPad:
    def spec(*shape):
        return TensorSpec.contiguous(shape, torch.bfloat16)

    return RmsNormSiluPad(
        spec(1, frames, 4, 4, channels),
        spec(channels),
        spec(1, frames + 2, 6, 6, channels),
        spec(1, frames, 4, 4, channels),
        target=target,
    )


def test_kernels_are_listed_once_and_refusals_left_to_the_plans(monkeypatch):
    monkeypatch.setattr(KERNELS, "_kernels", {})  # what other tests have compiled is not listed

    def spec(*shape):
        return TensorSpec.contiguous(shape, torch.bfloat16)

    declined = Conv3dRmsNormSiluPad(
        spec(1, 3, 6, 6, 64), spec(640, 3, 3, 3, 64), spec(640), spec(640),
        spec(1, 3, 6, 6, 640), spec(1, 1, 4, 4, 640), target="sm_90a",
    )  # fmt: skip
    plans = [norm(8), norm(8, frames=2), norm(16), norm(8, "sm_80"), norm(8, "cpu"), declined]
    found = ahead.kernels_of(plans)
    assert sorted(target for _, target in found) == ["sm_80", "sm_90a", "sm_90a"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_plans_find_what_was_compiled_ahead(jobs):
    channels = 8 * (40 + jobs)  # no other test compiles these
    line = ahead.precompile([norm(channels)], jobs)
    before = KERNELS.stats()
    norm(channels).compile()
    after = KERNELS.stats()
    if jobs == 1:
        assert line == "no kernels compiled ahead"
        assert after.compiled == before.compiled + 1
    else:
        assert line.startswith("1 of 1 kernels compiled ahead")
        assert (after.compiled, after.found) == (before.compiled, before.found + 1)


def test_an_exported_kernel_is_callable_again(tmp_path):
    build, *_ = ahead.kernels_of([norm(8 * 43)]).values()
    path = tmp_path / "kernel.o"
    ahead._export(build, path)
    kernel = load_kernel(path)
    assert isinstance(kernel, CompiledKernel)
    with pytest.raises(TypeError, match="parameters"):
        kernel.call(1)


class InlinePool:
    """A pool whose workers are this process, and whose first job fails."""

    def __init__(self, *args, **kwargs):
        self._jobs = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def submit(self, function, *args):
        self._jobs += 1
        future = Future()
        if self._jobs == 1:
            future.set_exception(RuntimeError("out of memory"))
        else:
            future.set_result(function(*args))
        return future


def test_a_failure_is_told_and_not_fatal(monkeypatch):
    monkeypatch.setattr(ahead, "ProcessPoolExecutor", InlinePool)
    line = ahead.precompile([norm(8 * 44), norm(8 * 45)], 2)
    assert line.startswith("1 of 2 kernels compiled ahead")
    assert line.endswith("RuntimeError: out of memory")
    before = KERNELS.stats()
    norm(8 * 44).compile()
    norm(8 * 45).compile()
    after = KERNELS.stats()
    assert (after.compiled, after.found) == (before.compiled + 1, before.found + 1)
