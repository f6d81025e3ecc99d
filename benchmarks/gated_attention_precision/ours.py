# SPDX-License-Identifier: Apache-2.0
"""Our arms: the block in a mode and in BF16, the attention and the product of codes, quantisers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gated_attention_block import data
from benchmarks.gated_attention_block.ours import OURS, engines_of
from benchmarks.gated_attention_precision.gemm_problem import FAST
from benchmarks.gated_attention_precision.quantize_problem import SCALE
from benchmarks.gated_attention_precision.sdpa_problem import CODES
from benchmarks.harness.arm import Arm, Launch, Role
from benchmarks.harness.memory import held
from cudnn_blocks import GatedAttentionBlockFwd, Gemm, QuantizeBlock, QuantizeFp8, SdpaFwd
from cudnn_blocks.blocks.gated_attention_precision import BLOBS

if TYPE_CHECKING:
    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.gated_attention_precision.block_problem import PrecisionBlockProblem
    from benchmarks.gated_attention_precision.gemm_problem import Fp8GemmProblem
    from benchmarks.gated_attention_precision.quantize_problem import QuantizeProblem
    from benchmarks.gated_attention_precision.sdpa_problem import Fp8SdpaProblem
    from cudnn_blocks.target import Target

BF16_FUSED, OURS_FAST = "bf16-fused", "ours-fast"
OPERANDS = ("h", "w_qkvg", *data.SMALL, "w_o", "out")
PRODUCT = ("x8", "w8", "y")


def gemm_plan(
    problem: Fp8GemmProblem, sample: Tensors, variant: str, target: Target | None = None
) -> Gemm:
    """The unchecked plan."""
    operands = (sample[name] for name in PRODUCT)
    is_fast = variant == FAST
    return Gemm(*operands, alpha=problem.alpha, fast_accumulation=is_fast, target=target)


def gemm_arm(problem: Fp8GemmProblem, sample: Tensors, name: str, variant: str) -> Arm:
    """The op; its engine says how often partial sums are promoted."""
    plan = gemm_plan(problem, sample, variant)
    plan.compile()

    def bind(buffers: Tensors) -> Launch:
        return partial(plan.execute, *(buffers[name] for name in PRODUCT))

    stage = plan.describe().splitlines()[1].strip()
    engine = f"{stage}; {held(problem.weight_bytes)}"
    return Arm(name, Role.OURS, engine, bind, variant, plan.describe())


def quantize_plan(
    problem: QuantizeProblem, sample: Tensors, target: Target | None = None
) -> QuantizeFp8 | QuantizeBlock:
    """The unchecked plan."""
    operands = list(sample.values())
    if problem.block is None:
        return QuantizeFp8(*operands, scale=SCALE, target=target)
    build = partial(QuantizeBlock, fmt=problem.fmt, along_tokens=problem.along_tokens)
    return build(*operands, target=target)


def quantize_arm(problem: QuantizeProblem, sample: Tensors) -> Arm:
    """The op."""
    plan = quantize_plan(problem, sample)
    plan.compile()

    def bind(buffers: Tensors) -> Launch:
        return partial(plan.execute, **buffers)

    return Arm(OURS, Role.OURS, engines_of(plan), bind, "", plan.describe())


def sdpa_plan(problem: Fp8SdpaProblem, sample: Tensors, target: Target | None = None) -> SdpaFwd:
    """The unchecked plan."""
    q, k, v = (sample[name] for name in CODES.values())
    return SdpaFwd(q, k, v, sample["o"], problem.geometry, target=target)


def sdpa_arm(problem: Fp8SdpaProblem, sample: Tensors) -> Arm:
    """The op; every buffer set has its own workspace."""
    plan = sdpa_plan(problem, sample)
    plan.compile()
    size_bytes = plan.get_workspace_size()

    def bind(buffers: Tensors) -> Launch:
        operands: dict[str, Any] = {name: buffers[codes] for name, codes in CODES.items()}
        device, workspace = buffers["o"].device, None
        if size_bytes:
            workspace = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return partial(plan.execute, **operands, o=buffers["o"], workspace=workspace)

    return Arm(OURS, Role.OURS, engines_of(plan), bind, "", plan.describe())


def block_plan(
    problem: PrecisionBlockProblem, sample: Tensors, name: str, target: Target | None = None
) -> GatedAttentionBlockFwd:
    """The unchecked plan of the problem's mode, or of fused BF16."""
    is_bf16 = name == BF16_FUSED
    fuse = is_bf16 or problem.is_fused
    operands = operands_of(sample, is_bf16=is_bf16)
    samples: dict[str, Any] = {f"sample_{name}": operand for name, operand in operands.items()}
    return GatedAttentionBlockFwd(
        **samples,
        geometry=problem.geometry,
        fuse_norm_rope=fuse,
        fuse_gate=fuse,
        quant=None if is_bf16 else problem.quant,
        target=target,
    )


def operands_of(buffers: Tensors, *, is_bf16: bool) -> dict[str, Any]:
    """What a call takes, by name: values in BF16, or codes and their scales."""
    if is_bf16:
        return {name: buffers[name] for name in OPERANDS}
    codes = {name: buffers.get(f"{name}_codes", buffers[name]) for name in OPERANDS}
    return codes | {blob: buffers[blob] for blob in BLOBS if blob in buffers}


def block_arm(problem: PrecisionBlockProblem, sample: Tensors, name: str, role: Role) -> Arm:
    """The block; every buffer set has its own workspace."""
    plan = block_plan(problem, sample, name)
    plan.compile()
    is_bf16 = name == BF16_FUSED
    size_bytes = plan.get_workspace_size()

    def bind(buffers: Tensors) -> Launch:
        operands = operands_of(buffers, is_bf16=is_bf16)
        workspace = torch.empty(size_bytes, dtype=torch.uint8, device=buffers["h"].device)
        return partial(plan.execute, **operands, workspace=workspace)

    weight_bytes = problem.bf16_weight_bytes if is_bf16 else problem.weight_bytes
    engine = f"{engines_of(plan)}; {held(weight_bytes, size_bytes)}"
    return Arm(name, role, engine, bind, "", plan.describe())
