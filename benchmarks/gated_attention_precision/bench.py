# SPDX-License-Identifier: Apache-2.0
"""How the precision modes of the block are measured."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from benchmarks.gated_attention_block import data
from benchmarks.gated_attention_block.ours import OURS, engines_of
from benchmarks.gated_attention_block.sampled import SampledCase
from benchmarks.gated_attention_precision.sdpa_problem import CODES
from benchmarks.harness.arm import Arm, Launch, Offer, Role, offer, own
from cudnn_blocks import GatedAttentionBlockFwd, SdpaFwd
from cudnn_blocks.blocks.gated_attention_precision import BLOBS
from cudnn_blocks.target import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.gated_attention_block.sampled import Tensors
    from benchmarks.gated_attention_precision.block_problem import PrecisionBlockProblem
    from benchmarks.gated_attention_precision.sdpa_problem import Fp8SdpaProblem
    from benchmarks.harness.timing import GraphTimer

BF16_FUSED, FA3_FP8 = "bf16-fused", "fa3-fp8"
OPERANDS = ("h", "w_qkvg", *data.SMALL, "w_o", "out")


class PrecisionBlockCase(SampledCase):
    """A mode against the fused BF16 block on the same values; eager and as a graph."""

    family = "block"
    kinds = (family, "latency")
    modes = ("eager", "graph")
    has_equal_bursts = True

    def __init__(self, problem: PrecisionBlockProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        arms = partial(block_arm, self.problem, sets[0])
        return [
            own(OURS, partial(arms, OURS, Role.OURS)),
            offer(BF16_FUSED, partial(arms, BF16_FUSED, Role.PEER)),
        ]

    @override
    def plans(self) -> Sequence[Any]:
        sample = self.problem.make_set("meta")
        target = Target.of_device(torch.device("cuda", torch.cuda.current_device()))
        return [block_plan(self.problem, sample, name, target) for name in (OURS, BF16_FUSED)]


class Fp8SdpaCase(SampledCase):
    """Attention of codes against FlashAttention-3's FP8 forward."""

    family = "sdpa"
    kinds = (family, "latency")
    has_equal_bursts = True

    def __init__(self, problem: Fp8SdpaProblem, device: str = "cuda") -> None:
        super().__init__(problem, device)
        self.problem = problem

    @override
    def offers(self, sets: Sequence[Tensors], timer: GraphTimer | None) -> list[Offer]:
        build = partial(sdpa_arm, self.problem, sets[0])
        return [own(OURS, build), offer(FA3_FP8, partial(flash_attention_3, self.problem, sets[0]))]

    @override
    def plans(self) -> Sequence[Any]:
        target = Target.of_device(torch.device("cuda", torch.cuda.current_device()))
        return [sdpa_plan(self.problem, self.problem.make_set("meta"), target)]


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


def flash_attention_3(problem: Fp8SdpaProblem, sample: Tensors) -> Arm:
    """The forward-only package, on codes; its descales are 1 where none are given."""
    function = import_module("fa3_fwd_interface").flash_attn_func
    scale, is_causal = problem.geometry.scale, problem.geometry.is_causal

    def bind(buffers: Tensors) -> Launch:
        q, k, v = (buffers[name] for name in CODES.values())

        def attend() -> Tensors:
            found = function(q, k, v, softmax_scale=scale, causal=is_causal)
            return {"o": found[0] if isinstance(found, (tuple, list)) else found}

        return attend

    bind(sample)()
    return Arm(FA3_FP8, Role.PEER, "fa3_fwd", bind)


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
    sizes = f"weights {weight_bytes / 1e6:.1f} MB, workspace {size_bytes / 1e6:.1f} MB"
    return Arm(name, role, f"{engines_of(plan)}; {sizes}", bind, "", plan.describe())
