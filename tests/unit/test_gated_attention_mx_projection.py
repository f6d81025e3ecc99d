# SPDX-License-Identifier: Apache-2.0
"""The fused projection of block-scaled operands: its rounding, what its launches take, its copy."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from cudnn_blocks import DriverError, NotServedError, QkvGateProjection, ops
from cudnn_blocks.artifacts.objects import kernels_of
from cudnn_blocks.blocks.gated_attention_modes import PROJ_NORM_ROPE
from cudnn_blocks.quant_spec import BLOCK_FORMATS
from cudnn_blocks.reference.gated_attention_precision import values_of
from cudnn_blocks.stages import copy_rows as copying
from cudnn_blocks.stages.copy_rows import copy_rows
from cudnn_blocks.stages.gemm.stage import GemmStage
from cudnn_blocks.stages.kernel_stage import KernelStage
from cudnn_blocks.target import GPU_TARGET_NAMES
from tests.helpers.gated_attention_precision import D128, MODES, make_precision_problem
from tests.helpers.tensors import assert_same_bits
from tests.oracles import gated_attention_precision_reference as oracle
from tests.oracles.gated_attention_reference import norm_and_rotate

FUSED = [name for name, mode in MODES.items() if mode.fused and not mode.is_per_tensor]
WRITTEN = ("q8", "sf_q", "k8", "sf_k", "v8", "sf_v", "gate16")
BANDS = {"q": D128.h_q, "gate": D128.h_q, "k": D128.h_kv, "v": D128.h_kv}
LENGTHS = [40, 23]
fused = pytest.mark.parametrize("name", FUSED)


def make(name: str = "mxfp8-fused", tokens: int = 40, **options):
    torch.manual_seed(11)
    options = {"seq_lens": LENGTHS, "table_rows": 50, **options}
    return make_precision_problem(MODES[name], D128, 2, tokens, **options)


def views_of(problem, plan, workspace) -> dict[str, torch.Tensor]:
    return plan._wiring.regions.views(plan._layout, workspace, *problem["h"].shape[:2])


def run_stage(problem, plan=None) -> dict[str, torch.Tensor]:
    """What the stage has written, of a call on the CPU."""
    plan = problem.compiled() if plan is None else plan
    workspace = problem.workspace(plan)
    operands = plan._wiring.stage_operands(problem.operands, plan._layout, workspace)[0]
    stage = plan._stages[0]
    if plan.target.is_cpu:
        stage.run_reference(operands)
    else:
        stage.launch(operands, 77)
    views = views_of(problem, plan, workspace)
    return {name: views[name] for name in WRITTEN}


def values(problem, name: str) -> torch.Tensor:
    """The BF16 values of an operand."""
    fmt = problem.mode.w_qkvg if name == "w_qkvg" else "mxfp8"
    return values_of(problem[name], problem[f"{name}_sf"], BLOCK_FORMATS[fmt])


# Rounding.


@fused
def test_codes_are_those_of_the_fused_bf16_projection(name):
    """Bit by bit what the quantisers make of it, and GATE its band."""
    problem = make(name)
    h, w = values(problem, "h"), values(problem, "w_qkvg")
    slab = torch.empty(2, 40, D128.n_qkvg, dtype=torch.bfloat16)
    small = [problem[one] for one in ("w_q_norm", "w_k_norm", "cos", "sin")]
    names = ("w_q_norm", "w_k_norm", "cos", "sin")
    samples = {f"sample_{one}": tensor for one, tensor in zip(names, small, strict=True)}
    projection = QkvGateProjection(h, w, slab, D128, fuse_norm_rope=True, **samples)
    projection.compile()
    projection.execute(h, w, slab, *small)
    bands = slab.unflatten(-1, (-1, D128.d_head)).split(list(BANDS.values()), dim=2)
    written = run_stage(problem)
    for one, band in zip(BANDS, bands, strict=True):
        if one == "gate":
            assert_same_bits(written["gate16"], band.contiguous(), "gate16")
            continue
        is_v = one == "v"
        seq_lens = problem["seq_lens"] if is_v else None
        codes, scales = ops.quantize_block(band, "mxfp8", along_tokens=is_v, seq_lens=seq_lens)
        assert_same_bits(written[f"{one}8"], codes, f"{one}8")
        assert_same_bits(written[f"sf_{one}"], scales.view(torch.uint8), f"sf_{one}")


@pytest.mark.parametrize("one", ["q", "k", "v"])
def test_values_are_rounded_to_bf16_before_they_become_codes(one):
    """The FP64 oracle with that rounding gives the codes; without it, some are their neighbours."""
    problem = make(seq_lens=[40, 40])
    found = oracle.e4m3(run_stage(problem)[f"{one}8"].float())
    slab = problem.real("h").double() @ problem.real("w_qkvg").double().T
    widths = [heads * D128.d_head for heads in BANDS.values()]
    bands = dict(zip(BANDS, slab.split(widths, dim=-1), strict=True))
    exact = bands[one].unflatten(-1, (-1, D128.d_head))
    if one != "v":
        tables = (problem["cos"], problem["sin"])
        exact = norm_and_rotate(exact, problem[f"w_{one}_norm"], *tables, D128)

    def wrong(x: torch.Tensor) -> float:
        blocked = x.transpose(1, -1) if one == "v" else x
        padded = torch.nn.functional.pad(blocked, (0, -blocked.shape[-1] % 32)).double()
        blocks = padded.unflatten(-1, (-1, 32))
        scale = oracle.block_scales(blocks.abs().amax(-1, keepdim=True), 448.0, has_e8m0=True)
        codes = oracle.e4m3(blocks / scale).flatten(-2)[..., : blocked.shape[-1]]
        codes = codes.transpose(1, -1) if one == "v" else codes
        return (codes != found).double().mean().item()

    assert wrong(oracle.bf16(exact)) < 1e-3
    assert wrong(exact) > 5e-3


# Launches.


class Runtime(SimpleNamespace):
    """Stands in for the CUDA runtime: copies on the host, or refuses."""

    def __init__(self, error: str = "cudaSuccess") -> None:
        errors = SimpleNamespace(cudaSuccess=SimpleNamespace(name="cudaSuccess"))
        super().__init__(cudaError_t=errors, streams=[])
        self.cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToDevice=3)
        is_good = error == "cudaSuccess"
        self.answer = errors.cudaSuccess if is_good else SimpleNamespace(name=error)

    def cudaMemcpy2DAsync(self, to, to_pitch, source, pitch, width, height, kind, stream):  # noqa: N802
        assert kind == 3
        self.streams.append(stream)
        for row in range(height):
            ctypes.memmove(to + row * to_pitch, source + row * pitch, width)
        return (self.answer,)


@pytest.fixture
def runtime(monkeypatch):
    def replace(error: str = "cudaSuccess") -> Runtime:
        stand_in = Runtime(error)
        monkeypatch.setattr(copying, "load_runtime", lambda: stand_in)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        return stand_in

    return replace


@fused
@pytest.mark.parametrize("tokens", [40, 7])
def test_launches_take_what_the_reference_takes(name, tokens, runtime, monkeypatch):
    """Six kernels and a copy on the given stream, each replaced by its reference."""
    launched, stand_in = [], runtime()

    def launch(stage, operands, stream):
        assert stream == 77
        launched.append(type(stage).__name__)
        stage.run_reference(operands)

    monkeypatch.setattr(KernelStage, "launch", launch)
    plan = make(name).to("meta").plan(target="sm_90a")
    plan.check_support()
    problem = make(name, tokens, seq_lens=[tokens, 3])
    found, wanted = run_stage(problem, plan), run_stage(problem)
    assert launched == ["DequantizeStage"] * 2 + ["GemmStage"] + ["QuantizeStage"] * 3
    assert stand_in.streams == [77]
    for region in WRITTEN:
        assert_same_bits(found[region], wanted[region], region)


@pytest.mark.parametrize(("batch", "tokens"), [(2, 5), (1, 1), (3, 1)])
def test_copied_rows(batch, tokens, runtime):
    runtime()
    slab = torch.randn(batch, tokens, 48).bfloat16()
    wide = torch.zeros(batch, tokens, 24, dtype=torch.bfloat16)
    copy_rows(slab[..., 8:24], wide[..., :16], 5)
    assert_same_bits(wide[..., :16].contiguous(), slab[..., 8:24].contiguous(), "copied")
    assert not wide[..., 16:].any()


def test_a_copy_that_the_runtime_refuses(runtime):
    runtime("cudaErrorInvalidPitchValue")
    rows = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    with pytest.raises(DriverError, match="6 rows of 16 bytes: cudaErrorInvalidPitchValue"):
        copy_rows(rows, rows.clone(), 5)


def test_the_runtime_has_what_a_copy_calls():
    runtime = copying.load_runtime()
    assert callable(runtime.cudaMemcpy2DAsync)
    assert runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice == 3
    assert runtime.cudaError_t.cudaSuccess == 0


# What a plan says.


@fused
@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_every_kernel_is_listed(name, target):
    """For the disk cache, workers and bundles."""
    plan = make(name).to("meta").plan(target=target)
    kernels = [build.kernel for build in kernels_of([plan]).values()]
    engine = "hopper" if target == "sm_90a" else "portable"
    assert f"cudnn_blocks.stages.gemm.{engine}.GemmNormRopeKernel" in kernels
    quantisers = [kernel for kernel in kernels if kernel.endswith(".QuantizeKernel")]
    dequantisers = [kernel for kernel in kernels if kernel.endswith(".DequantizeKernel")]
    assert len(quantisers) >= 3
    assert len(dequantisers) >= 4


@fused
def test_scratch_is_that_of_the_stage_that_needs_most(name):
    plan = make(name).to("meta").plan(target="sm_90a")
    plan.check_support()
    rows = 2 * 40
    values = (rows * D128.d_model, D128.n_qkvg * D128.d_model, rows * D128.n_qkvg)
    assert plan._layout.regions[-1].name == "engine_scratch"
    assert plan._layout.regions[-1].size_bytes == 2 * sum(values)


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
def test_pins(target):
    problem = make().to("meta")
    plan = problem.plan(target=target, engines={PROJ_NORM_ROPE: "portable"})
    stage = plan.probe().stages[0]
    ran = target == "sm_90a"
    assert (stage.stage, stage.engine) == (PROJ_NORM_ROPE, "portable")
    assert stage.status.endswith("gpu_test.log" if ran else "compile-only")
    assert stage.smem_bytes > 0
    line = plan._stages[0].describe()
    assert "QK-norm and RoPE" in line
    assert line.endswith("of dequantised mxfp8 x mxfp8, to mxfp8")
    with pytest.raises(NotServedError, match=f"^{PROJ_NORM_ROPE}: cudnn: normed_d_head=128"):
        problem.plan(target=target, engines={PROJ_NORM_ROPE: "cudnn"}).check_support()
    assert [row.engine for row in stage.engines] == [row.engine for row in GemmStage.rows]
