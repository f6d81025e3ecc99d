# SPDX-License-Identifier: Apache-2.0
"""What the encoder and the decoder have in common, turned into steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from cudnn_blocks.integrations.diffusers.conv_steps import Conv, ConvAdd, ConvNorm, Norm
from cudnn_blocks.integrations.diffusers.family import Family
from cudnn_blocks.integrations.diffusers.flow import Step
from cudnn_blocks.integrations.diffusers.torch_steps import Attention, SkipConv
from cudnn_blocks.integrations.diffusers.weights import Weights

Named = tuple[str, Any]
"""A module and its path in the model."""


def named_list(path: str, modules: Any) -> list[Named]:
    """The modules of a ``ModuleList``."""
    return [(f"{path}.{i}", module) for i, module in enumerate(modules)]


@dataclass
class Builder:
    """Makes steps of a model's modules, and packs their weights on the way."""

    family: Family
    weights: Weights = field(default_factory=Weights)

    def norm(self, name: str, module: Any) -> Norm:
        """A norm with the SiLU behind it."""
        return Norm(name, module, self.family)

    def norm_before(self, block: Named) -> Norm:
        """The norm that a residual block begins with."""
        name, module = block
        return self.norm(f"{name}.norm1", module.norm1)

    def conv(self, name: str, module: Any) -> Conv:
        """A 3x3x3 convolution."""
        return Conv(name, module, self.family, self.weights)

    def residual_blocks(self, blocks: Sequence[Named], then: Norm | None) -> list[Step]:
        """Residual blocks from behind the first one's norm to before ``then``.

        Each convolution takes the norm behind it into its launch, ``then`` included; without it,
        the last one leaves a plain sum.
        """
        steps: list[Step] = []
        for i, (name, module) in enumerate(blocks):
            behind = self.norm_before(blocks[i + 1]) if i + 1 < len(blocks) else then
            if not isinstance(module.conv_shortcut, nn.Identity):
                steps.append(SkipConv(f"{name}.conv_shortcut", module.conv_shortcut))
            norm2 = self.norm(f"{name}.norm2", module.norm2)
            conv1 = self.conv(f"{name}.conv1", module.conv1)
            conv2 = self.conv(f"{name}.conv2", module.conv2)
            steps.append(ConvNorm(conv1, norm2, self.family, adds=False))
            steps.append(
                ConvAdd(conv2)
                if behind is None
                else ConvNorm(conv2, behind, self.family, adds=True)
            )
        return steps

    def middle_block(self, path: str, module: Any, then: Norm) -> list[Step]:
        """The middle of the model with its first norm: residual blocks, attention between them."""
        blocks = named_list(f"{path}.resnets", module.resnets)
        steps: list[Step] = [self.norm_before(blocks[0])]
        for i, (name, attention) in enumerate(named_list(f"{path}.attentions", module.attentions)):
            steps += self.residual_blocks(blocks[i : i + 1], None)
            steps += [Attention(name, attention), self.norm_before(blocks[i + 1])]
        return steps + self.residual_blocks(blocks[-1:], then)
