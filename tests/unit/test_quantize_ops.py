# SPDX-License-Identifier: Apache-2.0
"""The quantising ops on the reference engine: results, dynamic extents, refusals, tracing."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from cudnn_blocks import (
    ContractError,
    DequantizeBlock,
    NotServedError,
    QuantizeBlock,
    QuantizeFp8,
    ops,
)
from cudnn_blocks.errors import GradModeError
from cudnn_blocks.plan_cache import PLANS
from cudnn_blocks.quant_spec import BLOCK_FORMATS, E4M3
from cudnn_blocks.stages.quantize.stage import QuantizeKvStage, QuantizeModes, QuantizeStage
from cudnn_blocks.target import TARGET_NAMES, Target
from tests.helpers.quantize_problem import (
    make_blocks,
    make_codes,
    make_fp8,
    make_values,
    same_numbers,
    spec_blocks,
    spec_fp8,
)
from tests.helpers.tensors import assert_same_bits

BF16, FP16 = torch.bfloat16, torch.float16
CPU = Target.parse("cpu")
formats = pytest.mark.parametrize("fmt", BLOCK_FORMATS)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("shape", [(2, 37, 3, 64), (1, 1, 1, 8), (130, 40)])
def test_fp8(dtype, shape):
    problem = make_fp8(shape, dtype=dtype)
    expected = problem.expected()["codes"]
    assert_same_bits(problem.run()["codes"], expected, "codes")
    codes = ops.quantize_fp8(problem["x"], 0.37)
    assert codes.is_contiguous()
    assert_same_bits(codes, expected, "codes")


@formats
@pytest.mark.parametrize("shape", [(2, 37, 3, 64), (1, 1, 1, 32), (130, 160)])
def test_blocks_there_and_back(fmt, shape):
    problem = make_blocks(fmt, shape, is_wild=True)
    expected = problem.expected()
    problem.run()
    for name in ("codes", "scales"):
        assert_same_bits(problem[name], expected[name], name)
    codes, scales = ops.quantize_block(problem["x"], fmt)
    assert_same_bits(codes, expected["codes"], "codes")
    assert_same_bits(scales, expected["scales"], "scales")
    back = make_codes(fmt, shape)
    expected_y = back.expected()["y"]
    assert same_numbers(back.run()["y"], expected_y).all()
    y = ops.dequantize_block(back["codes"], back["scales"], fmt)
    assert same_numbers(y, expected_y).all()


def test_scales_of_rows_are_one_array():
    """``[R, D]`` is not a batch: its blob is that of R rows, whatever it was a view of."""
    x = make_values((2, 70, 1, 64))
    rows = x.reshape(140, 64)
    codes, scales = ops.quantize_block(rows, "mxfp4")
    assert scales.numel() == 256 * 4
    four, per_head = ops.quantize_block(x, "mxfp4")
    assert per_head.numel() == 2 * 128 * 4
    assert torch.equal(codes, four.view(140, 32))


def test_packed_codes_may_have_their_own_dtype():
    problem = make_blocks("nvfp4")
    expected = problem.expected()
    own = problem.with_(
        codes=problem["codes"].view(torch.float4_e2m1fn_x2),
        scales=problem["scales"].view(torch.uint8),
    ).run()
    assert_same_bits(own["codes"].view(torch.uint8), expected["codes"], "codes")
    back = DequantizeBlock(own["codes"], own["scales"], torch.empty_like(own["x"]), fmt="nvfp4")
    back.compile()
    y = torch.empty(own["x"].shape, dtype=BF16)
    back.execute(own["codes"], own["scales"], y)
    assert_same_bits(y, ops.dequantize_block(problem["codes"], own["scales"], "nvfp4"), "y")


def test_a_plan_serves_smaller_extents():
    plan = make_blocks("mxfp8", (3, 70, 2, 64)).plan()
    plan.compile()
    for shape in ((3, 70, 2, 64), (1, 1, 2, 64), (2, 33, 2, 64)):
        problem = make_blocks("mxfp8", shape)
        expected = problem.expected()
        problem.run(plan)
        for name in ("codes", "scales"):
            assert_same_bits(problem[name], expected[name], name)
    with pytest.raises(ContractError, match="S: expected at most 70, the sample's, got 71"):
        make_blocks("mxfp8", (1, 71, 2, 64)).run(plan)


@pytest.mark.parametrize("shape", [(0, 5, 4, 64), (2, 0, 4, 64), (0, 64)])
def test_an_empty_call(shape):
    make_fp8(shape).run()
    for fmt in BLOCK_FORMATS:
        problem = make_blocks(fmt, shape).run()
        codes, scales = ops.quantize_block(problem["x"], fmt)
        assert scales.numel() == 0
        assert ops.dequantize_block(codes, scales, fmt).shape == shape


def test_the_scale_of_a_plan_may_change():
    problem = make_fp8()
    plan = problem.plan()
    plan.compile()
    for scale in (0.37, 2.0):
        plan.scale = scale
        problem.run(plan)
        assert_same_bits(problem["codes"], ops.quantize_fp8(problem["x"], scale), "codes")
    for bad in (0.0, math.inf, -1.0):
        with pytest.raises(ContractError, match="^scale: expected a positive normal"):
            plan.scale = bad
        with pytest.raises(ContractError, match="^scale: expected a positive normal"):
            ops.quantize_fp8(problem["x"], bad)
    assert plan.scale == 2.0
    with pytest.raises(TypeError, match="^scale: expected float, got str"):
        plan.scale = "1"


def test_k_and_v_have_scales_of_their_own():
    stage = QuantizeKvStage("quantize_kv", QuantizeModes("fp8", 3, 64), 37, CPU)
    stage.check()
    k, v = make_values((2, 37, 3, 64)), make_values((2, 37, 3, 64))
    k8, v8 = (torch.zeros(k.shape, dtype=torch.uint8).view(E4M3) for _ in range(2))
    stage.scale_k, stage.scale_v = 0.5, 3.0
    stage.run_reference([k, k8, v, v8])
    assert_same_bits(k8, ops.quantize_fp8(k, 0.5), "k8")
    assert_same_bits(v8, ops.quantize_fp8(v, 3.0), "v8")


def test_a_stage_takes_rows_of_three_axes():
    """As the block hands over its attention output: B * S rows of one blob."""
    stage = QuantizeStage("quantize_fp4_o", QuantizeModes("nvfp4", 1, 192), 74, CPU)
    stage.check()
    x = make_values((2, 37, 3, 64)).flatten(2)
    codes = torch.zeros(2, 37, 96, dtype=torch.uint8)
    expected = ops.quantize_block(x.reshape(74, 192), "nvfp4")
    scales = torch.full_like(expected[1].view(torch.uint8), 0xFF)
    stage.run_reference([x.contiguous(), codes, scales])
    assert torch.equal(codes.view(74, 96), expected[0])
    assert torch.equal(scales, expected[1].view(torch.uint8))


def zeros(*shape, dtype=BF16):
    return torch.zeros(shape, dtype=dtype)


BAD = [
    ({"x": zeros(2, 37, 192)}, r"^x: expected shape \[R, D\] or \[B, S, H, D\]"),
    ({"x": zeros(2, 37, 3, 64).half()}, r"^x: expected dtype torch.bfloat16"),
    ({"x": zeros(2, 37, 3, 68)[..., :64]}, "^x: expected strides .* multiples of 8"),
    ({"codes": zeros(2, 37, 3, 32, dtype=torch.uint8)}, r"^codes: expected shape .* 64\]"),
    ({"codes": zeros(2, 37, 3, 64).half()}, "^codes: expected dtype torch.float8_e4m3fn"),
    ({"scales": zeros(3071, dtype=torch.uint8)}, r"^scales: expected shape \[3072\], got \[3071\]"),
    ({"scales": zeros(3072).half()}, "^scales: expected dtype torch.float8_e8m0fnu"),
    ({"scales": zeros(6144, dtype=torch.uint8)[::2]}, "^scales: expected contiguous strides"),
    ({"seq_lens": zeros(2, dtype=torch.int32)}, "^seq_lens: expected None unless along_tokens"),
]


@pytest.mark.parametrize(("changes", "match"), BAD)
def test_a_bad_sample_or_operand(changes, match):
    problem = make_blocks("mxfp8")
    with pytest.raises(ContractError, match=match):
        problem.with_(**changes).plan().check_support()
    plan = problem.plan()
    plan.compile()
    with pytest.raises(ContractError):
        problem.with_(**changes).run(plan)


def test_formats_and_sizes_outside_the_contract():
    with pytest.raises(ContractError, match="^fmt: expected one of mxfp8, mxfp4, nvfp4, got 'fp4'"):
        ops.quantize_block(zeros(4, 64), "fp4")
    with pytest.raises(TypeError, match="^fmt: expected str"):
        ops.quantize_block(zeros(4, 64), 4)
    for fmt, width in (("mxfp8", 48), ("mxfp4", 16), ("nvfp4", 24)):
        with pytest.raises(ContractError, match=f"^d_head: expected a multiple of .* got {width}"):
            ops.quantize_block(zeros(4, width), fmt)
    with pytest.raises(ContractError, match=r"^along_tokens: expected False for \[R, D\]"):
        ops.quantize_block(zeros(64, 64), "mxfp8", along_tokens=True)
    for shape in ((), (64,), (2, 3, 64)):
        with pytest.raises(ContractError, match=r"^[xy]: expected shape \[R, D\] or"):
            ops.quantize_fp8(zeros(*shape), 1.0)
    for name, call in (
        ("x", partial(ops.quantize_fp8, None, 1.0)),
        ("x", partial(ops.quantize_block, None, "mxfp8")),
        ("codes", partial(ops.dequantize_block, None, None, "mxfp8")),
        ("scales", partial(ops.dequantize_block, zeros(4, 64), None, "mxfp8")),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected "):
            call()


def test_an_overlap_is_refused():
    memory = torch.zeros(64 * 64 * 2, dtype=torch.uint8)
    x, codes = memory.view(BF16).view(64, 64), memory[: 64 * 64].view(E4M3).view(64, 64)
    plan = QuantizeFp8(x, codes, scale=1.0)
    plan.compile()
    with pytest.raises(ContractError, match="^codes: .* apart from x, got overlapping"):
        plan.execute(x, codes)


@pytest.mark.parametrize("target", TARGET_NAMES)
def test_what_is_served(target):
    engine = "reference" if target == "cpu" else "portable"
    plans = [
        *(spec_fp8(shape, dtype, target=target) for shape in SHAPES for dtype in (BF16, FP16)),
        *(spec_blocks(f, shape, target=target) for shape in SHAPES for f in BLOCK_FORMATS),
        *(
            spec_blocks(f, shape, is_back=True, target=target)
            for shape in SHAPES
            for f in BLOCK_FORMATS
        ),
        *(
            spec_blocks("mxfp8", (2, 5, 3, 48), is_back=b, along_tokens=True, target=target)
            for b in (False, True)
        ),
    ]
    for plan in plans:
        report = plan.probe()
        assert report.served, report.decline
        assert [stage.engine for stage in report.stages] == [engine]


SHAPES = ((2, 5, 3, 64), (1, 1, 1, 32), (2**20, 2048), (2**20, 2**16, 16, 256), (7, 96))


@pytest.mark.parametrize("target", TARGET_NAMES)
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("is_back", [False, True])
def test_other_formats_along_tokens_decline(target, fmt, is_back):
    with pytest.raises(NotServedError, match=rf"{fmt} along tokens \(served: .*mxfp8 along tokens"):
        spec_blocks(
            fmt, (2, 5, 3, 64), is_back=is_back, along_tokens=True, target=target
        ).check_support()


def test_sizes_that_no_kernel_serves():
    for width, plan in (
        (12, spec_fp8((4, 12), target="sm_90a")),
        (12, spec_blocks("mxfp8", (2, 5, 3, 12), along_tokens=True, target="sm_90a")),
    ):
        with pytest.raises(NotServedError, match=rf"d_head={width} \(served: multiples of 8\)"):
            plan.check_support()
    with pytest.raises(NotServedError, match=r"d_head=40 \(served: multiples of 16\)"):
        spec_blocks(
            "mxfp8", (2, 5, 3, 40), is_back=True, along_tokens=True, target="sm_90a"
        ).check_support()
    huge = (1, 2**24, 16, 64)
    with pytest.raises(NotServedError, match=rf"batch_vecs={2**31} \(served: up to "):
        spec_fp8(huge, target="sm_90a").check_support()
    assert spec_fp8(huge, target="cpu").probe().served


def test_pins():
    assert spec_fp8((4, 64), target="sm_90a", engines={"quantize": "portable"}).probe().served
    for engine, target in (("reference", "sm_90a"), ("portable", "cpu")):
        for plan in (
            spec_fp8((4, 64), target=target, engines={"quantize": engine}),
            spec_blocks(
                "nvfp4", (4, 64), is_back=True, target=target, engines={"dequantize": engine}
            ),
        ):
            with pytest.raises(NotServedError, match=f"{engine}: target={target} "):
                plan.check_support()


def test_functional_plans_are_found_again():
    x = make_values((2, 5, 4, 64))
    for _ in range(3):
        ops.quantize_fp8(x, 1.0)
        ops.quantize_block(x, "mxfp8")
    assert PLANS.stats().size == 2


def test_grad_mode():
    x = torch.zeros(4, 64, dtype=BF16, requires_grad=True)
    for call in (
        lambda: ops.quantize_fp8(x, 1.0),
        lambda: ops.quantize_block(x, "mxfp4"),
    ):
        with pytest.raises(GradModeError, match="^x: requires grad"):
            call()


def test_opcheck_and_compile(device):
    x = make_values((2, 5, 4, 64), device=device)
    codes, scales = ops.quantize_block(x, "nvfp4")
    library = torch.ops.cudnn_blocks
    calls = (
        (library.quantize_fp8.default, (x, 0.5)),
        (library.quantize_block.default, (x, "mxfp8")),
        # Schema checks compare inputs by arithmetic, which torch does not have for codes.
        (library.dequantize_block.default, (codes, scales.view(torch.uint8), "nvfp4")),
    )
    for op, arguments in calls:
        with torch.no_grad():
            results = torch.library.opcheck(
                op,
                arguments,
                test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
            )
        assert set(results.values()) == {"SUCCESS"}
        assert not op._schema.is_mutable
    torch._dynamo.reset()

    def there_and_back(x):
        codes, scales = ops.quantize_block(x, "nvfp4")
        return ops.dequantize_block(codes, scales, "nvfp4")

    backend = {"cpu": "aot_eager", "cuda": "inductor"}[device.type]
    compiled = torch.compile(there_and_back, fullgraph=True, backend=backend)
    assert_same_bits(compiled(x), there_and_back(x), "y")


def test_classes_are_public():
    import cudnn_blocks

    for op in (QuantizeFp8, QuantizeBlock, DequantizeBlock):
        assert getattr(cudnn_blocks, op.__name__) is op
