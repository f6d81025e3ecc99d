# SPDX-License-Identifier: Apache-2.0
"""The benchmark of ``encode``: its operations, its arms on the CPU, and the groups of kernels."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch

from benchmarks import wan_vae_encode
from benchmarks.harness.case import Lab
from benchmarks.wan_vae_encode import bench, shares
from benchmarks.wan_vae_encode.bench import EncodeCase
from benchmarks.wan_vae_encode.problem import EncodeProblem, eager_model

LAB = Lab(rounds=1, l2_bytes=60 << 20, ceiling_gb_s=None, timer=None, check_only=True)
SMALL = {"base_dim": 8, "z_dim": 4}


@pytest.fixture(autouse=True)
def _no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    for cached in (eager_model, bench.prepared, bench.accelerated):
        cached.cache_clear()


def small(frames):
    return EncodeCase(EncodeProblem(frames, 16, 32, SMALL), "cpu")


@pytest.mark.parametrize("frames", [1, 5])
def test_every_arm_is_right(frames):
    rows = {row.arm: row for row in small(frames).measure(LAB).rows}
    assert {arm for arm, row in rows.items() if row.status == "ok"} == {
        "ours",
        "eager",
        "channels_last_3d",
    }
    assert rows["ours"].engine == "reference"
    assert rows["torch-compile"].status == "missing"


def test_a_wrong_encoder_is_found(monkeypatch):
    case = small(1)
    real = bench.encode

    def wrong(vae, video):
        return real(vae, video) + 0.5 * ("forward" in vars(vae.encoder))

    monkeypatch.setattr(bench, "encode", wrong)
    rows = {row.arm: row for row in case.measure(LAB).rows}
    assert rows["ours"].status == "failed"
    assert "rows off" in rows["ours"].note
    assert rows["eager"].status == "ok"


def test_without_diffusers_a_row_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    (row,) = small(1).measure(LAB).rows
    assert (row.arm, row.status) == ("diffusers", "missing")


def test_operations_are_those_of_the_encoder():
    """A later chunk has three planes of every filter, but for what lies before the clip."""
    first, second, third = (EncodeProblem(frames).flops for frames in (1, 5, 9))
    assert first == pytest.approx(1.352e12, rel=0.002)
    assert third - second == pytest.approx(12.16e12, rel=0.002)
    assert 0.85 < (second - first) / (third - second) < 0.95
    assert EncodeProblem(17).flops == second + 3 * (third - second)


def test_one_peer_alone_has_a_case_of_its_own():
    case = EncodeCase(EncodeProblem(1, 16, 32, SMALL), "cpu", only="eager")
    assert {row.arm for row in case.measure(LAB).rows} == {"ours", "eager"}


def test_every_goal_has_a_case():
    labels = [f"encode/{case.label}" for case in wan_vae_encode.BENCH.cases]
    assert labels[:3] == [f"encode/wan-2.2/704x1280x{frames}" for frames in (1, 17, 81)]
    assert {goal.case for goal in wan_vae_encode.BENCH.goals} <= set(labels)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("kernel_cutlass_cudnn_blocksstagesconv3dhopperConv3dKernel_0", "convolutions"),
        ("kernel_cutlass_cudnn_blocksstagesnormportableRmsNormSiluPadKernel_0", "norms"),
        ("sm90_xmma_fprop_implicit_gemm_bf16", "cuDNN"),
        ("nvjet_tst_128x256", "products"),
        ("void at::native::elementwise_kernel<direct_copy_kernel_cuda>", "copies"),
        ("void at::native::reduce_kernel<512, 1, MeanOps>", "reductions"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "the rest"),
    ],
)
def test_kernels_are_told_apart(kernel, group):
    assert group in shares.group_of(kernel)


def test_shares_add_up():
    kernels = Counter({"nvjet": 30.0, "cudnn_blocks_Conv3dKernel": 60.0})
    rows = shares.shares_of(kernels, 100.0)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert {row["group"]: row["us"] for row in rows}["no kernel"] == 10
