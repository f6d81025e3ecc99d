# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels on disk: made once for all processes, loaded by the others, or made again."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from cudnn_blocks import (
    CausalConv1dGeometry,
    CausalConv1dUpdate,
    GatedAttentionBlockFwd,
    GatedAttentionGeometry,
    TensorSpec,
)
from cudnn_blocks.artifacts import CACHE_VARIABLE, DiskCache, disk_cache, warm_up
from cudnn_blocks.artifacts.kernel_key import kernel_key
from cudnn_blocks.stages import kernel_store
from cudnn_blocks.stages.kernel_cache import (
    KERNELS,
    CompiledKernel,
    KernelBuild,
    KernelCache,
    KernelCacheStats,
)
from cudnn_blocks.stages.kernel_store import KernelStore, compiler_facts, disk_store
from tests.helpers.conv3d_forms import BIAS_PAD, CAUSAL, NORM, NORM_ONLY, NORM_PAD, RAW
from tests.helpers.conv3d_problem import spec_plan

TARGET = "sm_90a"
NUM_PROCESSES = 16
WAIT_S = 100

FRESH = """
import json
import torch
from cudnn_blocks import CausalConv1dGeometry, CausalConv1dUpdate, TensorSpec
from cudnn_blocks.stages.kernel_cache import KERNELS
from cutlass import cute

def conv1d(channels):
    def spec(*shape):
        return TensorSpec.contiguous(shape, torch.bfloat16)
    return CausalConv1dUpdate(
        spec(64, channels), spec(64, channels, 4), spec(channels, 4), spec(64, channels),
        CausalConv1dGeometry(channels, 4, 4), target="sm_90a",
    )

def outcome():
    stats = KERNELS.stats()
    return [stats.compiled, stats.loaded]
"""


def conv1d(channels: int) -> CausalConv1dUpdate:
    def spec(*shape):
        return TensorSpec.contiguous(shape, torch.bfloat16)

    return CausalConv1dUpdate(
        spec(64, channels), spec(64, channels, 4), spec(channels, 4), spec(64, channels),
        CausalConv1dGeometry(channels, 4, 4), target=TARGET,
    )  # fmt: skip


@pytest.fixture
def cache(monkeypatch, tmp_path) -> DiskCache:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return disk_cache()


def get(kernels: KernelCache, channels: int) -> CompiledKernel:
    """The kernel of ``conv1d(channels)`` through another kernel cache than the process's."""
    plan = conv1d(channels)
    plan.check_support()
    (stage,) = plan._stages
    choice = stage._choose_kernel()
    build = KernelBuild(choice.kernel, choice.config, stage.target)
    return kernels.get((choice.config, TARGET), build)


def objects_of(cache: DiskCache):
    return sorted((cache.folder / "objects").rglob("*.o"))


def test_a_plan_leaves_its_kernel_for_a_fresh_process(cache):
    before = KERNELS.stats()
    conv1d(611).compile()
    after = KERNELS.stats()
    assert (after.compiled, after.loaded) == (before.compiled + 1, before.loaded)
    assert len(objects_of(cache)) == 1
    program = """
cute.compile = None
plan = conv1d(611)
plan.compile()
try:
    plan._stages[0]._call(1)
except TypeError as error:
    assert "parameters" in str(error)
print(json.dumps(outcome()))
"""
    done = subprocess.run(
        [sys.executable, "-c", FRESH + program],
        capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, 1]


def test_sixteen_cold_processes_compile_each_kernel_once(cache):
    """Field case S27. One import serves all sixteen; no kernel is compiled before they part."""
    program = f"""
import gc, os
from cudnn_blocks.stages.conv1d import portable
from cudnn_blocks.stages import kernel_store
gc.freeze()  # or every child copies what its collector touches
num, channels = {NUM_PROCESSES}, [613, 617]
start, results, children = os.pipe(), os.pipe(), []
for i in range(num):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(start[1])
            os.read(start[0], 1)  # until the parent lets go
            plans = [conv1d(channels[(i + j) % 2]) for j in range(2)]
            for plan in plans:
                plan.compile()
            calls = sum(callable(plan._stages[0]._call) for plan in plans)
            assert calls >= KERNELS.stats().loaded  # compiled ones are for a GPU that is not here
            os.write(results[1], (json.dumps(outcome()) + "\\n").encode())
            status = 0
        finally:
            os._exit(status)
    children.append(child)
os.close(start[1])
os.close(results[1])
assert [os.waitpid(child, 0)[1] for child in children] == [0] * num
with os.fdopen(results[0]) as lines:
    print(json.dumps([json.loads(line) for line in lines]))
"""
    done = subprocess.run(
        [sys.executable, "-c", FRESH + program],
        capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) == NUM_PROCESSES
    assert sum(compiled for compiled, _ in outcomes) == 2
    assert all(compiled + loaded == 2 for compiled, loaded in outcomes)
    assert len(objects_of(cache)) == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "one bit", "no kernel"])
def test_a_damaged_kernel_is_compiled_again_and_replaced(cache, damage):
    get(KernelCache(disk_store), 619)
    (path,) = objects_of(cache)
    data = path.read_bytes()
    if damage == "no kernel":  # sound as far as the disk is concerned
        (name,) = [json.loads(one.read_text())["key"] for one in path.parent.glob("*.json")]
        cache.put(name, lambda fresh: fresh.write_bytes(b"not an object file"))
    else:
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 0x10
        path.write_bytes({"truncated": data[:1000], "empty": b"", "one bit": flipped}[damage])
    kernels = KernelCache(disk_store)
    get(kernels, 619)
    assert kernels.stats() == KernelCacheStats(compiled=1, found=0)
    kernels = KernelCache(disk_store)
    assert callable(get(kernels, 619).call)
    assert kernels.stats() == KernelCacheStats(compiled=0, found=0, loaded=1)


def test_a_process_killed_in_mid_write_leaves_nothing_to_load(cache):
    program = """
import os, signal
os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL)
conv1d(623).compile()
"""
    died = subprocess.run([sys.executable, "-c", FRESH + program], check=False, timeout=WAIT_S)
    assert died.returncode < 0
    assert objects_of(cache) == []
    kernels = KernelCache(disk_store)
    get(kernels, 623)
    assert kernels.stats().compiled == 1
    assert len(objects_of(cache)) == 1


@pytest.mark.parametrize("names", ["full", "refused"])
def test_a_disk_that_takes_nothing_costs_one_warning(cache, monkeypatch, names):
    def refuse(*_):
        raise OSError("No space left on device") if names == "full" else RuntimeError("no")

    monkeypatch.setattr(os, "replace", refuse)
    kernels = KernelCache(disk_store)
    with pytest.warns(RuntimeWarning) as told:
        kernel = get(kernels, 631)
    assert len(told) == 1
    assert get(kernels, 631) is kernel
    assert kernels.stats() == KernelCacheStats(compiled=1, found=1)


def test_kernels_of_others_are_not_kept_on_disk(cache):
    kernels = KernelCache(disk_store)
    exported = []
    kernels.get(object(), lambda: CompiledKernel(None, export=exported.append))
    assert kernels.stats().compiled == 1
    assert (exported, objects_of(cache)) == ([], [])


def test_a_kernel_cache_keeps_nothing_of_the_compiler():
    kernels = KernelCache()
    assert kernels.get("a", lambda: CompiledKernel(None, export=print)).export is None


def test_what_changes_code_changes_the_key(monkeypatch):
    facts = compiler_facts()
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", "/elsewhere")
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "10")
    assert compiler_facts() == facts
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert compiler_facts() != facts
    monkeypatch.setattr(kernel_store, "OPTIONS", "--enable-tvm-ffi --opt-level 1")
    assert compiler_facts()["options"] != facts["options"]
    assert facts["nvidia-cutlass-dsl"]


def test_every_kind_of_kernel_has_a_key_of_its_own(monkeypatch):
    asked = []

    def keep(key, build):
        asked.append(key)
        assert pickle.loads(pickle.dumps(build)) == build  # workers get it
        return CompiledKernel(None)

    monkeypatch.setattr(KERNELS, "get", keep)
    conv3d = [(kind, {}) for kind in (RAW, NORM, NORM_PAD, BIAS_PAD, CAUSAL, NORM_ONLY)]
    conv3d += [(RAW, {"engines": {"conv3d": "portable"}}), (NORM_ONLY, {"residual": "add"})]
    plans = [spec_plan(kind, target=TARGET, **options) for kind, options in conv3d]
    plans += [conv1d(637), *(block(fuse_gate=fuse, target=TARGET) for fuse in (False, True))]
    plans += [block(fuse_gate=False, target="sm_80")]
    for plan in plans:
        plan.compile()
    configs = set(asked)
    assert len(configs) >= len(plans) - 1
    facts = compiler_facts()
    assert len({kernel_key(config, facts) for config in configs}) == len(configs)


def block(**options) -> GatedAttentionBlockFwd:
    geometry = GatedAttentionGeometry(d_model=1024, h_q=4, h_kv=2, d_head=256, rope_dim=64)

    def spec(*shape):
        return TensorSpec.contiguous(shape, torch.bfloat16)

    hidden, norm, table = spec(1, 256, 1024), spec(256), spec(1, 256, 64)
    w_qkvg, w_o = spec(geometry.n_qkvg, 1024), spec(1024, geometry.attn_width)
    return GatedAttentionBlockFwd(
        hidden, w_qkvg, norm, norm, table, table, w_o, hidden, geometry, **options
    )


WARM = """
import cudnn_blocks

if __name__ == "__main__":
    plans = [conv1d(channels) for channels in (641, 643, 641)]
    cudnn_blocks.warm(plans, jobs=2)
    assert all(plan._compiled for plan in plans)
    assert all(callable(plan._stages[0]._call) for plan in plans)
    conv1d(643).warm()
    print(json.dumps(outcome()))
"""


def test_workers_compile_what_plans_will_ask_for(cache, tmp_path):
    program = tmp_path / "serve.py"
    program.write_text(FRESH.replace("from cutlass import cute", "") + WARM)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, 2]
    assert "2/2" in done.stderr
    assert len(objects_of(cache)) == 2


def test_without_a_disk_they_leave_it_in_a_temporary_folder(monkeypatch):
    used = []

    def aside(builds, temporary, _jobs, _step):
        used.append(temporary)
        for key, build in builds.items():
            assert pickle.loads(pickle.dumps(build)) == build
            KernelStore(temporary).get(key, build)

    monkeypatch.setattr(warm_up, "_compile_aside", aside)
    plan = conv1d(647)
    plan.warm(progress=False)
    assert callable(plan._stages[0]._call)
    assert not used[0].folder.exists()


def test_what_workers_fail_at_is_left_to_the_plan(cache, monkeypatch):
    class BrokenPool:
        def __init__(self, *_args, **_options):
            pass

        def submit(self, *_):
            future = Future()
            future.set_exception(BrokenProcessPool("a worker was killed"))
            return future

        def shutdown(self, **_):
            pass

    monkeypatch.setattr(warm_up, "ProcessPoolExecutor", BrokenPool)
    before = KERNELS.stats().compiled
    warm_up.warm([conv1d(653), conv1d(659)], jobs=2, progress=False)
    assert KERNELS.stats().compiled == before + 2
    assert len(objects_of(cache)) == 2
