# SPDX-License-Identifier: Apache-2.0
"""What the engines of attention serve: every value of every row, and the neighbours outside."""

from __future__ import annotations

import itertools

import pytest
import torch

from cudnn_blocks import ContractError, NotServedError
from cudnn_blocks.stages.attention.stage import MAX_SEQ_LEN, SdpaStage
from cudnn_blocks.target import GPU_TARGET_NAMES, TARGET_NAMES
from tests.helpers.sdpa_problem import make_problem, spec_plan

ROWS = {row.engine: row for row in SdpaStage.rows}
DTYPES = (torch.bfloat16, torch.float16)
KERNELS = ("hopper", "portable")


def stage_of(plan):
    plan.check_support()
    (stage,) = plan._stages
    return stage


@pytest.mark.parametrize("target", TARGET_NAMES)
@pytest.mark.parametrize("d_head", [64, 128, 256])
def test_the_preferred_engine(target, d_head):
    default = {"cpu": "reference", "sm_90a": "hopper"}.get(target, "portable")
    for dtype in DTYPES:
        stage = stage_of(spec_plan(d_head=d_head, dtype=dtype, target=target))
        assert stage.engine == default


@pytest.mark.parametrize("engine", KERNELS)
def test_every_value_of_the_row(engine):
    row = ROWS[engine]
    for target, d_head, dtype in itertools.product(row.targets.values, (64, 128, 256), DTYPES):
        plan = spec_plan(d_head=d_head, dtype=dtype, target=target, engines={"sdpa": engine})
        stage = stage_of(plan)
        assert stage.engine == engine
        ran = target == "sm_90a"
        assert stage.status.startswith("run: benchmarks/results" if ran else "compile-only")
        assert all(stage.facts[fact] in served for fact, served in row.serves.items())
    assert row.serves["d_head"].values == (64, 128, 256)
    assert row.serves["dtype"].values == ("bf16", "fp16", "e4m3")  # test_sdpa_fp8.py


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"d_head": 32}, r"portable: d_head=32 \(served: 64, 128, 256\)"),
        ({"d_head": 96}, r"portable: d_head=96 \(served: 64, 128, 256\)"),
        ({"d_head": 512}, r"portable: d_head=512 \(served"),
        ({"s": MAX_SEQ_LEN + 1}, r"portable: seq_len=268435457 \(served: up to 268435456\)"),
        ({"sk": MAX_SEQ_LEN + 1}, r"portable: seq_len=268435457 "),
        ({"b": 2**20, "s": 2**17}, r"portable: tiles=\d+ \(served: up to 2147483647\)"),
    ],
)
def test_a_neighbour_is_declined(target, sizes, match):
    plan = spec_plan(target=target, **sizes)
    with pytest.raises(NotServedError, match=rf"^sdpa: .*{match}"):
        plan.check_support()
    report = spec_plan(target=target, **sizes).probe()
    assert (report.served, report.decline_type) == (False, "NotServedError")


def test_the_reference_takes_every_head_size():
    for d_head in (8, 96, 512):
        make_problem(d_head=d_head, heads=(2, 1)).run()
    with pytest.raises(ContractError, match="^q: expected dtype"):
        spec_plan(dtype=torch.float32, target="cpu").check_support()


@pytest.mark.parametrize("target", sorted(set(TARGET_NAMES) - {"sm_90a"}))
def test_hopper_is_for_hopper(target):
    plan = spec_plan(target=target, engines={"sdpa": "hopper"})
    with pytest.raises(NotServedError, match=f"hopper: target={target} .served: sm_90a"):
        plan.check_support()


def test_pins():
    with pytest.raises(NotServedError, match="engine=triton"):
        spec_plan(target="sm_90a", engines={"sdpa": "triton"}).check_support()
    with pytest.raises(NotServedError, match=r"reference: target=sm_90a \(served: cpu\)"):
        spec_plan(target="sm_90a", engines={"sdpa": "reference"}).check_support()
    with pytest.raises(ContractError, match="^engines: expected stage names"):
        spec_plan(target="sm_90a", engines={"attention": "portable"}).check_support()


def test_describe_names_mask_and_operands():
    plan = spec_plan(
        target="sm_80",
        has_gate=True,
        has_lse=True,
        has_seq_lens=True,
        causal_bottom_right=True,
        window_left=7,
    )
    wanted = (
        "bf16, heads 4/2, D=64, causal bottom-right left 7, gate, lse, seq_lens, 64 keys a step"
    )
    assert f"sdpa: portable (compile-only) {wanted}" in plan.describe()
    assert "full, allocates" in spec_plan(target="cpu", is_causal=False).describe()


@pytest.mark.parametrize("target", GPU_TARGET_NAMES)
@pytest.mark.parametrize("d_head", [64, 128, 256])
def test_shared_memory_fits(target, d_head):
    stage = stage_of(spec_plan(d_head=d_head, target=target, engines={"sdpa": "portable"}))
    assert 0 < stage.smem_bytes() <= stage.target.smem_per_cta_bytes
