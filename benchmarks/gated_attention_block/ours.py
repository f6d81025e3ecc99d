# SPDX-License-Identifier: Apache-2.0
"""Our arms: the default engine of every op, its other engines beside it, plans called bare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gated_attention_block import data
from benchmarks.gated_attention_block.gemm_problem import NORM_ROPE, GemmProblem
from benchmarks.gated_attention_block.sdpa_problem import GATE, SdpaProblem
from benchmarks.harness.arm import Arm, Launch, Offer, Role, offer, own
from cudnn_blocks import (
    GatedAttentionBlockFwd,
    Gemm,
    QkNormRope,
    QkvGateProjection,
    SdpaFwd,
    SigmoidGate,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gated_attention_block.block_problem import BlockProblem
    from benchmarks.gated_attention_block.pointwise_problem import GateProblem, NormRopeProblem
    from benchmarks.gated_attention_block.sampled import Tensors

OURS, PORTABLE, CUDNN = "ours", "portable", "cudnn"
UNFUSED = "unfused"
"""Variant of the block with both knobs off."""
PROJECTION = ("x", "w", "y", *data.SMALL)
NORM_ROPE_OPERANDS = ("q", "k", *data.SMALL)
BLOCK_OPERANDS = ("h", "w_qkvg", *data.SMALL, "w_o", "out")


@dataclass(frozen=True)
class Op:
    """An unchecked plan and the names of what its ``execute`` takes."""

    plan: Any
    operands: tuple[str, ...]


def gemm_op(
    problem: GemmProblem, sample: Tensors, variant: str, engine: str | None, target: Any = None
) -> Op:
    """The plain product, or the projection with its epilogue."""
    x, w, y = (sample[name] for name in "xwy")
    if variant != NORM_ROPE:
        plan = Gemm(x, w, y, target=target, engines=_pins("gemm", engine))
        return Op(plan, PROJECTION[:3])
    small = {f"sample_{name}": sample[name] for name in data.SMALL}
    pins = _pins("qkv_gate_proj_norm_rope", engine)
    plan = QkvGateProjection(
        x, w, y, problem.geometry, **small, fuse_norm_rope=True, target=target, engines=pins
    )
    return Op(plan, PROJECTION)


def sdpa_op(
    problem: SdpaProblem, sample: Tensors, variant: str, engine: str | None, target: Any = None
) -> Op:
    """Attention, plain or gated."""
    names = ("q", "k", "v", "o")
    gates = {"sample_gate": sample["gate"]} if variant == GATE else {}
    plan = SdpaFwd(
        *(sample[name] for name in names),
        problem.geometry,
        **gates,
        target=target,
        engines=_pins("sdpa", engine),
    )
    return Op(plan, (*names, "gate") if gates else names)


def norm_rope_op(problem: NormRopeProblem, sample: Tensors, target: Any = None) -> Op:
    """Norm and rotation in place."""
    operands = (sample[name] for name in NORM_ROPE_OPERANDS)
    eps = problem.geometry.qk_norm_eps
    return Op(QkNormRope(*operands, qk_norm_eps=eps, target=target), NORM_ROPE_OPERANDS)


def gate_op(problem: GateProblem, sample: Tensors, target: Any = None) -> Op:
    """The gate, into another tensor."""
    del problem
    names = ("o", "gate", "out")
    return Op(SigmoidGate(*(sample[name] for name in names), target=target), names)


def _pins(stage: str, engine: str | None) -> dict[str, str] | None:
    return None if engine is None else {stage: engine}


def arm_of(op: Op, name: str = OURS, role: Role = Role.OURS, variant: str = "") -> Arm:
    """The compiled plan's ``execute``."""
    op.plan.compile()

    def bind(buffers: Tensors) -> Launch:
        return partial(op.plan.execute, *(buffers[name] for name in op.operands))

    return Arm(name, role, engines_of(op.plan), bind, variant, op.plan.describe())


def engine_arms(
    build: Callable[[str | None], Op], variant: str, device: str, others: Sequence[str] = ()
) -> list[Offer]:
    """The default engine, and others that are another one; cuDNN may be absent."""
    arms: list[Offer] = [own(OURS, lambda: arm_of(build(None), variant=variant), variant)]
    default = arms[0].engine
    for engine in () if device == "cpu" else others:
        if engine == default:
            continue
        name = f"{OURS}-{engine}"
        make = partial(_engine_arm, build, engine, name, variant)
        arms.append((offer if engine == CUDNN else own)(name, make, variant))
    return arms


def _engine_arm(build: Callable[[str | None], Op], engine: str, name: str, variant: str) -> Arm:
    return arm_of(build(engine), name, Role.ENGINE, variant)


def block_plan(
    problem: BlockProblem, sample: Tensors, variant: str, target: Any = None
) -> GatedAttentionBlockFwd:
    """The unchecked plan, both knobs on unless the variant says otherwise."""
    fuse = variant != UNFUSED
    return GatedAttentionBlockFwd(
        *(sample[name] for name in BLOCK_OPERANDS),
        problem.geometry,
        fuse_norm_rope=fuse,
        fuse_gate=fuse,
        target=target,
    )


def block_arm(problem: BlockProblem, sample: Tensors, variant: str, role: Role = Role.OURS) -> Arm:
    """The block; every buffer set has its own workspace."""
    plan = block_plan(problem, sample, variant)
    plan.compile()

    def bind(buffers: Tensors) -> Launch:
        operands = [buffers[name] for name in BLOCK_OPERANDS]
        device = buffers["h"].device
        workspace = torch.empty(plan.get_workspace_size(), dtype=torch.uint8, device=device)
        return partial(plan.execute, *operands, workspace)

    return Arm(OURS, role, engines_of(plan), bind, variant, plan.describe())


def engines_of(plan: Any) -> str:
    """The engine of every stage; of all, where they agree."""
    engines = [str(stage.engine) for stage in plan.probe().stages]
    return engines[0] if len(set(engines)) == 1 else " + ".join(engines)
