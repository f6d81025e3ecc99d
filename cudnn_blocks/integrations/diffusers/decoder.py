# SPDX-License-Identifier: Apache-2.0
"""The steps of ``WanDecoder3d`` with residual up blocks."""

from __future__ import annotations

from typing import Any

from cudnn_blocks.integrations.diffusers.builder import Builder, named_list
from cudnn_blocks.integrations.diffusers.end_steps import Enter, Leave
from cudnn_blocks.integrations.diffusers.flow import Program, Step
from cudnn_blocks.integrations.diffusers.resample_steps import Up
from cudnn_blocks.integrations.diffusers.torch_steps import KeepShortcut


def decoder_program(decoder: Any, build: Builder) -> Program:
    """Everything between a latent frame and its patches; the last up block keeps its size."""
    steps: list[Step] = [Enter("decoder.conv_in", decoder.conv_in, build.family, build.weights)]
    ups = [
        (path, block, named_list(f"{path}.resnets", block.resnets))
        for path, block in named_list("decoder.up_blocks", decoder.up_blocks)
    ]
    norm_up = build.norm_before(ups[0][2][0])
    norm_out = build.norm("decoder.norm_out", decoder.norm_out)
    steps += build.middle_block("decoder.mid_block", decoder.mid_block, norm_up)
    for path, block, blocks in ups:
        if block is not ups[0][1]:
            steps.append(build.norm_before(blocks[0]))
        if block.upsampler is None:
            steps += build.residual_blocks(blocks, norm_out)
        else:
            steps += [KeepShortcut(), *build.residual_blocks(blocks, None)]
            steps.append(Up(path, block, build.weights))
    steps.append(Leave(build.conv("decoder.conv_out", decoder.conv_out)))
    return Program(steps)
