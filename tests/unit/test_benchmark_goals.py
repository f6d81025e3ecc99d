# SPDX-License-Identifier: Apache-2.0
"""Goals against rows, and kernel names against what a peer is called: no device needed."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness import kernels
from benchmarks.harness.arm import Arm, Role
from benchmarks.harness.goals import Goal, verdicts
from benchmarks.harness.kernels import DeviceKernel, cudnn_fault, is_cudnn
from benchmarks.harness.results import Row

ROW = Row(
    case="bare/160-160/later/T4-352x640",
    arm="ours",
    engine="hopper",
    mode="graph",
    median_us=1500.0,
    achieved=800.0,
    ceiling=1000.0,
    control_spread=0.02,
    ratio_to_best_peer=1.39,
)
XMMA = "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_kernel"
CUTLASS = "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16>"
LAYOUT = "void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16>"
POINTWISE = "triton_red_fused_add_convolution_div_linalg_vector_norm_mul_0"
VOL2COL = "void at::native::vol2col_kernel<c10::BFloat16>(long, c10::BFloat16 const*)"
GEMM = "nvjet_tst_192x192_64x4_2x1_v_bz_coopA_NNT"


def judge(goal: Goal, *rows: Row, is_whole: bool = True):
    return verdicts([goal], rows, is_whole=is_whole)


@pytest.mark.parametrize(
    ("goal", "got", "met"),
    [
        (Goal("bare/160-160/*", 1.40), 1.39, False),
        (Goal("bare/160-160/*", 1.39), 1.39, True),
        (Goal("bare/*", 1.40, forgives_spread=True), 1.39, True),
        (Goal("bare/*", 1.42, forgives_spread=True), 1.39, False),
        (Goal("bare/*", 0.85, "share"), 0.8, False),
        (Goal("*/T4-*", 0.80, "share"), 0.8, True),
    ],
)
def test_a_goal_is_met_or_not(goal, got, met):
    (verdict,) = judge(goal, ROW)
    assert (verdict.case, verdict.got, verdict.met) == (ROW.case, got, met)


def test_only_our_default_arm_counts():
    portable = ROW.model_copy(update={"arm": "ours-portable", "ratio_to_best_peer": 0.3})
    control = ROW.model_copy(update={"arm": "torch-conv3d (control)"})
    assert [one.met for one in judge(Goal("bare/*", 1.2), portable, ROW, control)] == [True]


def test_without_a_number_a_goal_is_unmet():
    lost = ROW.model_copy(update={"ratio_to_best_peer": None, "ceiling": None})
    for measure in ("ratio", "share"):
        (verdict,) = judge(Goal("bare/*", 0.0, measure), lost)
        assert (verdict.got, verdict.met) == (None, False)


def test_a_goal_without_rows_is_unmet_in_a_whole_run_only():
    goal = Goal("fused/*", 1.5)
    (verdict,) = judge(goal, ROW)
    assert (verdict.case, verdict.got, verdict.met) == ("fused/*", None, False)
    assert judge(goal, ROW, is_whole=False) == []


@pytest.mark.parametrize("name", [XMMA, XMMA + "__5x_cudnn", CUTLASS])
def test_names_of_cudnn_convolutions(name):
    assert is_cudnn(name)
    assert not any(map(is_cudnn, (POINTWISE, VOL2COL, GEMM)))


@pytest.mark.parametrize(
    ("launched", "fault"),
    [
        ([(XMMA, 500.0)], None),
        ([(LAYOUT, 40.0), (CUTLASS, 500.0), (POINTWISE, 120.0)], None),
        ([(POINTWISE, 500.0), (XMMA, 120.0)], "not cuDNN: longest is triton_red_fused"),
        ([(VOL2COL, 90.0), (GEMM, 500.0)], "not cuDNN: it launched at::native::vol2col"),
        ([(VOL2COL, 9.0), (XMMA, 500.0)], "not cuDNN: it launched at::native::vol2col"),
        ([("triton_tem_fused_convolution_0", 500.0)], "not cuDNN: it launched triton_tem"),
        ([(LAYOUT, 40.0), (GEMM, 500.0)], "not cuDNN: longest is nvjet"),
        ([], "not cuDNN: the profiler saw no kernel"),
    ],
)
def test_a_peer_that_is_not_cudnn_is_found_out(launched, fault):
    found = cudnn_fault([DeviceKernel(name, us) for name, us in launched])
    assert (found or "").startswith(fault or "")
    assert (found is None) is (fault is None)


@pytest.mark.parametrize(("name", "is_right"), [(XMMA, True), (GEMM, False)])
def test_the_arm_carries_its_kernel_and_its_fault(monkeypatch, name, is_right):
    monkeypatch.setattr(kernels, "device_kernels", lambda launch: [DeviceKernel(name, 500.0)])
    arm = kernels.cudnn_arm("torch-conv3d", lambda _: lambda: None, None, "channels last")
    assert arm.engine == f"channels last: {name}, 1 kernels"
    assert (arm.fault is None) is is_right


def test_device_kernels_are_what_the_trace_holds(monkeypatch):
    class Event:
        def __init__(self, name, us, device_type):
            self.name, self.device_type, self._us = name, device_type, us
            self.time_range = self

        def elapsed_us(self):
            return self._us

    kinds = torch.autograd.DeviceType
    traces = [[], [Event(XMMA, 5.0, kinds.CUDA), Event("Memset (Device)", 1.0, kinds.CUDA),
                   Event("aten::conv3d", 9.0, kinds.CPU)]]  # fmt: skip

    class Trace:
        def __init__(self, activities):
            self._events = traces.pop(0)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def events(self):
            return self._events

    monkeypatch.setattr(torch.profiler, "profile", Trace)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    launched = []
    assert kernels.device_kernels(lambda: launched.append(1)) == [DeviceKernel(XMMA, 5.0)]
    assert len(launched) == 3


def test_another_engine_of_ours_has_no_ratio_and_is_no_peer():
    from benchmarks.harness.rows import Measured, build_rows

    offers = [
        Arm("ours", Role.OURS, "hopper", lambda _: lambda: None),
        Arm("ours-portable", Role.ENGINE, "portable", lambda _: lambda: None),
        Arm("torch-conv3d", Role.PEER, "cuDNN", lambda _: lambda: None),
    ]
    rounds = {"ours": [10.0], "ours-portable": [5.0], "torch-conv3d": [14.0]}
    rows = build_rows(
        Measured(
            "bare",
            "160-160",
            "T1",
            "graph",
            offers,
            {},
            rounds,
            4_000_000,
            1000.0,
            flops=8_000_000_000,
            peak_tflop_s=1000.0,
        )
    )
    assert [row.ratio_to_best_peer for row in rows] == [1.4, None, None]
    ours = rows[0]
    assert (ours.floor_us, ours.achieved, ours.ceiling, ours.unit) == (
        8.0,
        800.0,
        1000.0,
        "TFLOP/s",
    )
