# SPDX-License-Identifier: Apache-2.0
"""The steps of ``WanEncoder3d`` with residual down blocks."""

from __future__ import annotations

from typing import Any

from cudnn_blocks.integrations.diffusers.builder import Builder, named_list
from cudnn_blocks.integrations.diffusers.end_steps import Enter, Leave
from cudnn_blocks.integrations.diffusers.flow import Program, Step
from cudnn_blocks.integrations.diffusers.resample_steps import AvgDown, Down
from cudnn_blocks.integrations.diffusers.torch_steps import AddShortcut

LARGE_BLOCKS = 2
"""Down blocks whose activations are too large for several chunks at a time."""


def encoder_program(encoder: Any, build: Builder) -> Program:
    """Everything between a chunk of patches and its moments."""
    by_chunk: list[Step] = [Enter("encoder.conv_in", encoder.conv_in, build.family, build.weights)]
    by_group: list[Step] = []
    for i, (path, block) in enumerate(named_list("encoder.down_blocks", encoder.down_blocks)):
        blocks = named_list(f"{path}.resnets", block.resnets)
        steps = by_chunk if i < LARGE_BLOCKS else by_group
        steps.append(build.norm_before(blocks[0]))
        steps.append(AvgDown(f"{path}.avg_shortcut", block.avg_shortcut))
        steps += build.residual_blocks(blocks, None)
        if block.downsampler is None:
            steps.append(AddShortcut(path))
        else:
            steps.append(Down(f"{path}.downsampler", block.downsampler, build.weights))
    norm_out = build.norm("encoder.norm_out", encoder.norm_out)
    by_group += build.middle_block("encoder.mid_block", encoder.mid_block, norm_out)
    by_group.append(Leave(build.conv("encoder.conv_out", encoder.conv_out)))
    return Program(by_chunk, by_group)
