# SPDX-License-Identifier: Apache-2.0
"""The product of e4m3 codes: the reference, the op on a CPU, tiles, and what is refused."""

from __future__ import annotations

import pytest
import torch

from cudnn_blocks import ContractError, Gemm, NotServedError, TensorSpec, ops
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.stages.gemm.epilogues import NormRope
from cudnn_blocks.stages.gemm.hopper_config import GemmKernelConfig, smem_bytes
from cudnn_blocks.stages.gemm.hopper_tiles import PROMOTED_TILES, TILES
from cudnn_blocks.target import Target

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def codes(*shape, pitch=None):
    """Every finite code, and rows ``pitch`` apart."""
    wide = torch.randint(0, 127, (*shape[:-1], pitch or shape[-1]), dtype=torch.uint8)
    wide |= torch.randint(0, 2, wide.shape, dtype=torch.uint8) << 7
    return wide.view(E4M3)[..., : shape[-1]]


def specs(rows, n, k):
    shapes = ((1, rows, k), E4M3), ((n, k), E4M3), ((1, rows, n), BF16)
    return [TensorSpec.contiguous(shape, dtype) for shape, dtype in shapes]


def test_op_equals_a_product_in_fp64():
    x, w = codes(2, 5, 64), codes(24, 64)
    # Small codes: their sums are exact in FP32, whatever their order.
    x, w = (t.view(torch.uint8).bitwise_and(0x8F | 0x38).view(E4M3) for t in (x, w))
    expected = ((x.double() @ w.double().t()).float() * 0.37).bfloat16()
    assert torch.equal(ops.gemm(x, w, alpha=0.37), expected)


def test_plan_takes_pitched_codes():
    x, w = codes(2, 5, 32, pitch=48), codes(8, 32)
    y = torch.empty(2, 5, 8, dtype=BF16)
    plan = Gemm(x, w, y, alpha=2.0)
    plan.compile()
    plan.execute(x, w, y)
    assert torch.equal(y, ((x.float() @ w.float().t()) * 2).bfloat16())


def test_nan_code_stays_in_its_row():
    x, w = codes(1, 4, 32), codes(8, 32)
    x.view(torch.uint8)[0, 2, 5] = 0x7F
    y = ops.gemm(x, w)
    assert y[0, 2].isnan().all()
    assert y[0, [0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_k_that_is_no_whole_vector_is_declined(target):
    with pytest.raises(NotServedError, match="k_bytes=24"):
        Gemm(*specs(5, 64, 24), target=target).check_support()


def test_cudnn_engine_declines_codes():
    plan = Gemm(*specs(5, 64, 32), target="sm_90a", engines={"gemm": "cudnn"})
    with pytest.raises(NotServedError, match="dtype=e4m3"):
        plan.check_support()


def test_alpha_of_values_is_refused():
    x = torch.empty(1, 2, 8, dtype=BF16)
    plan = Gemm(x, x[0], torch.empty(1, 2, 2, dtype=BF16), alpha=2.0)
    with pytest.raises(ContractError, match="alpha"):
        plan.check_support()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_fast_accumulation_of_values_is_refused(dtype):
    x = torch.empty(1, 2, 8, dtype=dtype)
    match = "^fast_accumulation: expected False with .*16 operands, got True"
    with pytest.raises(ContractError, match=match):
        ops.gemm(x, x[0], fast_accumulation=True)
    with pytest.raises(TypeError, match="^fast_accumulation: expected bool, got int"):
        Gemm(x, x[0], x, fast_accumulation=1)
    with pytest.raises(TypeError, match="^fast_accumulation: expected bool, got int"):
        ops.gemm(codes(1, 2, 16), codes(8, 16), fast_accumulation=1)


@pytest.mark.parametrize(
    ("target", "default", "fast"),
    [
        ("sm_90a", "FP32 sums every 128 of K", "fast accumulation"),
        ("sm_80", "tiles", "tiles"),
        ("cpu", "allocates", "allocates"),
    ],
)
def test_accumulation_is_accurate_unless_asked(target, default, fast):
    """It is said, and compiled in where a kernel has the choice."""
    sizes = specs(300, 512, 256)
    plans = [Gemm(*sizes, target=target, fast_accumulation=one) for one in (False, True)]
    said = [plan.describe() for plan in plans]
    assert default in said[0]
    assert fast in said[1]
    has_choice = target == "sm_90a"
    assert (said[0] != said[1]) == has_choice
    if target != "cpu":
        first, second = (plan._stages[0]._choose_kernel() for plan in plans)
        assert (first != second) == has_choice


def test_fast_accumulation_has_a_plan_of_its_own_and_the_same_bits_here():
    x, w = codes(1, 3, 64), codes(24, 64)
    PLANS.clear()
    accurate, fast = (ops.gemm(x, w, fast_accumulation=one) for one in (False, True))
    assert PLANS.stats().size == 2
    assert torch.equal(accurate, fast)
    traced = torch.compile(
        lambda x: ops.gemm(x, w, alpha=1.0, fast_accumulation=True),
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(traced(x), fast)
    checks = ("test_faketensor",)  # the others need arithmetic that torch has not for codes
    torch.library.opcheck(torch.ops.cudnn_blocks.gemm.default, (x, w, 0.5, True), test_utils=checks)


def test_result_of_codes_is_bf16():
    x, w, _ = specs(4, 32, 32)
    with pytest.raises(ContractError, match="y"):
        Gemm(x, w, TensorSpec.contiguous((1, 4, 32), torch.float16), target="cpu").check_support()


@pytest.mark.parametrize("rows", [1, 300, 4096, 32768])
@pytest.mark.parametrize(
    "norm_rope", [None, NormRope(256, 16, 2, 64, True), NormRope(128, 8, 2, 128, True)]
)
@pytest.mark.parametrize("promote_every", [0, 1])
def test_tile_fits_and_has_registers_for_promotion(rows, norm_rope, promote_every):
    target = Target.parse("sm_90a")
    config = GemmKernelConfig.from_geometry(
        rows, 9216, 2048, target, dtype="e4m3", norm_rope=norm_rope, promote_every=promote_every
    )
    assert config.tile in (PROMOTED_TILES if promote_every else TILES)
    assert smem_bytes(config) <= target.smem_per_cta_bytes
    if promote_every:
        fragment = config.fragment
        assert fragment.columns // 2 * (fragment.blocks + 1) <= 192


def test_codes_take_128_of_k_a_stage():
    config = GemmKernelConfig.from_geometry(64, 64, 64, Target.parse("sm_90a"), dtype="e4m3")
    values = GemmKernelConfig.from_geometry(64, 64, 64, Target.parse("sm_90a"), dtype="bf16")
    assert (config.k_tile, values.k_tile) == (128, 64)
    assert config.stage_bytes == values.stage_bytes
