# SPDX-License-Identifier: Apache-2.0
"""Operands of one call of a Conv3D op, the plan for them, and what has to come out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cudnn_blocks import (
    CausalConv3dGeometry,
    Conv3dGeometry,
    RmsNormSiluGeometry,
    TensorSpec,
    pack_causal_conv3d_weight,
    pack_conv3d_weight,
)
from cudnn_blocks.geometry import conv3d_shapes
from cudnn_blocks.geometry.conv3d_shapes import ResidualMode
from tests.helpers.conv3d_forms import (
    BIAS_PAD,
    CAUSAL,
    FORMS,
    NORM,
    NORM_ONLY,
    NORM_PAD,
    RAW,
    OpForms,
)
from tests.helpers.tensors import assert_same_bits, clone_exact

torch.set_num_threads(1)  # frames are small: threads would only wait for one another

BF16 = torch.bfloat16
ATOL = RTOL = 0.02


@dataclass(frozen=True)
class Conv3dProblem:
    """One call; ``clone()`` before a run that is to be repeated."""

    kind: str
    operands: dict[str, torch.Tensor | None]
    """Every operand in the order of ``execute``."""
    knobs: dict[str, int] = field(default_factory=dict)

    @property
    def forms(self) -> OpForms:
        return FORMS[self.kind]

    @property
    def written(self) -> dict[str, torch.Tensor]:
        """The declared operands that the op writes."""
        names = self.forms.op.written_names
        return {n: t for n, t in self.operands.items() if n in names and t is not None}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.operands[name]
        assert tensor is not None, name
        return tensor

    def plan(self, **keywords: Any) -> Any:
        samples = {f"sample_{name}": tensor for name, tensor in self.operands.items()}
        return self.forms.op(**samples, **self.knobs, **keywords)

    def compiled(self, **keywords: Any) -> Any:
        plan = self.plan(**keywords)
        plan.compile()
        return plan

    def workspace(self, plan: Any) -> dict[str, torch.Tensor]:
        """A poisoned workspace of the right size as a keyword, or nothing."""
        size_bytes = plan.get_workspace_size()
        if size_bytes == 0:
            return {}
        device = next(t.device for t in self.operands.values() if t is not None)
        return {"workspace": aligned_bytes(size_bytes, device)}

    def execute(self, plan: Any, **changes: Any) -> None:
        plan.execute(**{**self.operands, **self.workspace(plan), **changes})

    def run(self, **keywords: Any) -> Conv3dProblem:
        """Executes a new plan in place."""
        self.execute(self.compiled(**keywords))
        return self

    def call(self, **changes: Any) -> dict[str, torch.Tensor | None]:
        """The functional form on the operands that are only read."""
        written = self.forms.op.written_names
        given = {n: t for n, t in self.operands.items() if n not in written}
        if self.kind == NORM_ONLY and self.operands["residual"] is None:
            given["save_input"] = self.operands["residual_output"] is not None
        result = self.forms.function(**{**given, **self.knobs, **changes})
        return {"output": result} if isinstance(result, torch.Tensor) else result

    def clone(self) -> Conv3dProblem:
        copies = {n: None if t is None else clone_exact(t) for n, t in self.operands.items()}
        return replace(self, operands=copies)

    def with_(self, **changes: Any) -> Conv3dProblem:
        return replace(self, operands={**self.operands, **changes})

    def with_knobs(self, **knobs: int) -> Conv3dProblem:
        return replace(self, knobs={**self.knobs, **knobs})

    def expected(self) -> dict[str, torch.Tensor]:
        """What the reference writes beside the operands at hand."""
        clone = self.clone()
        clone.forms.reference(*clone.operands.values(), **self.knobs)
        return clone.written


def aligned_bytes(size_bytes: int, device: torch.device | str) -> torch.Tensor:
    """Poisoned bytes at a multiple of 256."""
    raw = torch.full((size_bytes + 256,), 0xFF, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % 256
    return raw[start : start + size_bytes]


def make_problem(
    kind: str,
    sites: tuple[int, int, int, int] = (2, 3, 4, 5),
    channels: tuple[int, int] = (16, 24),
    *,
    device: torch.device | str = "cpu",
    data: str = "normal",
    residual: str = "none",
    history_frames: int = 0,
    zero_leading_frames: int = 0,
    has_input_bias: bool = False,
    has_padded_input: bool = True,
) -> Conv3dProblem:
    """Random operands, ``"normal"`` or ``"integers"``; written ones poisoned with NaN.

    Args:
        kind: one of ``KINDS``.
        sites: ``N, T, H, W`` of the result without padding.
        channels: Ci, Co; the norm alone uses Co, the causal convolution neither.
        device: where.
        data: distribution of everything that is read.
        residual: value of a ``ResidualMode``; ``bias_residual_pad`` always has a residual.
        history_frames: P.
        zero_leading_frames: the hint, where the op has it.
        has_input_bias: of the norm alone.
        has_padded_input: False takes the causal scratch from the workspace.
    """
    shapes = _shapes(kind, sites, channels, residual, history_frames, has_input_bias)
    if not has_padded_input:
        del shapes["padded_input"]
    fill = {"normal": _normal, "integers": _integers}[data]
    forms = FORMS[kind]
    operands: dict[str, torch.Tensor | None] = {}
    for name in forms.op.operand_names:
        if name not in shapes:
            operands[name] = None
        elif name in forms.op.written_names:
            operands[name] = torch.full(shapes[name], math.nan, dtype=BF16, device=device)
        elif name == "packed_weight":
            operands[name] = _packed(kind, channels, data, device)
        else:
            operands[name] = fill(shapes[name], device)
    knobs = {"history_frames": history_frames, "zero_leading_frames": zero_leading_frames}
    return Conv3dProblem(kind, operands, {name: knobs[name] for name in forms.knobs})


def full_problem(kind: str, device: torch.device | str = "cpu") -> Conv3dProblem:
    """Every optional operand given."""
    return make_problem(
        kind, device=device, residual="add_biased", history_frames=2, has_input_bias=True
    )


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values some elements off an allocation's start."""
    base = torch.zeros(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    return base[elements:].view(tensor.shape).copy_(tensor)


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after each."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def spec_plan(
    kind: str,
    channels: tuple[int, int] = (160, 160),
    sites: tuple[int, int, int, int] = (1, 4, 88, 160),
    *,
    target: str,
    engines: dict[str, str] | None = None,
    residual: str = "none",
    history_frames: int = 0,
    zero_leading_frames: int = 0,
    has_input_bias: bool = False,
    has_padded_input: bool = True,
) -> Any:
    """A plan over specs for a named target: no memory, no GPU."""
    shapes = _shapes(kind, sites, channels, residual, history_frames, has_input_bias)
    if not has_padded_input:
        del shapes["padded_input"]
    forms = FORMS[kind]
    samples = {
        f"sample_{name}": TensorSpec.contiguous(shapes[name], BF16) if name in shapes else None
        for name in forms.op.operand_names
    }
    knobs = {"history_frames": history_frames, "zero_leading_frames": zero_leading_frames}
    given = {name: knobs[name] for name in forms.knobs}
    return forms.op(**samples, **given, target=target, engines=engines)


def _shapes(
    kind: str,
    sites: tuple[int, int, int, int],
    channels: tuple[int, int],
    residual: str,
    history_frames: int,
    has_input_bias: bool,
) -> dict[str, Any]:
    n, t, h, w = sites
    mode = ResidualMode(residual)
    geometry = Conv3dGeometry(*channels)
    x = (n, t + 2, h + 2, w + 2, channels[0])
    previous_channels = 12 if kind == CAUSAL else channels[1]
    previous = (n, history_frames, h, w, previous_channels) if history_frames else None
    if kind == RAW:
        return conv3d_shapes.conv3d_raw_shapes(geometry, x)
    if kind == NORM:
        return conv3d_shapes.conv3d_rmsnorm_silu_shapes(geometry, x, mode)
    if kind == NORM_PAD:
        return conv3d_shapes.conv3d_rmsnorm_silu_pad_shapes(
            geometry, x, mode, history_frames=history_frames
        )
    if kind == BIAS_PAD:
        return conv3d_shapes.conv3d_bias_residual_pad_shapes(
            geometry, x, has_residual_bias=mode is ResidualMode.ADD_BIASED
        )
    if kind == NORM_ONLY:
        return conv3d_shapes.rmsnorm_silu_pad_shapes(
            RmsNormSiluGeometry(channels[1]),
            (n, t, h, w, channels[1]),
            mode,
            has_input_bias=has_input_bias,
            previous_shape=previous,
        )
    return conv3d_shapes.causal_conv3d_with_cache_shapes(
        CausalConv3dGeometry(), (n, 12, t, h, w), previous_shape=previous
    )


def _normal(shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    # Small enough that one unit in the last place stays within the tolerance through the norm.
    return (torch.randn(shape, device=device) / 2).to(BF16)


def _integers(shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    return torch.randint(-3, 4, shape, device=device).to(BF16)


def _packed(
    kind: str, channels: tuple[int, int], data: str, device: torch.device | str
) -> torch.Tensor:
    in_channels, out_channels = (12, 160) if kind == CAUSAL else channels
    shape = (out_channels, in_channels, 3, 3, 3)
    if data == "integers":
        weight = torch.randint(-2, 3, shape, device=device).to(BF16)
    else:
        weight = (torch.randn(shape, device=device) / math.sqrt(27 * in_channels)).to(BF16)
    return (pack_causal_conv3d_weight if kind == CAUSAL else pack_conv3d_weight)(weight)


def assert_close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str = ""
) -> None:
    """Within the contract's tolerance; NaN (of poison) matches NaN alone."""
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name],
            tensor,
            atol=ATOL,
            rtol=RTOL,
            equal_nan=True,
            msg=lambda text, name=name: f"{what} {name}: {text}",
        )


def assert_exact(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str = ""
) -> None:
    """Bit for bit."""
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor, f"{what} {name}")
