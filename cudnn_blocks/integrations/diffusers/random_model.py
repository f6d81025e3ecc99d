# SPDX-License-Identifier: Apache-2.0
"""The WAN 2.2 video VAE with seeded random weights, to try things out without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cudnn_blocks.ops.conv3d_family import DTYPE

WAN_2_2: Mapping[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
}
"""The configuration in Wan-AI/Wan2.2-TI2V-5B-Diffusers, without the statistics of its latents."""


def random_model(device: torch.device | str = "cpu", *, seed: int = 0, **changes: Any) -> Any:
    """An ``AutoencoderKLWan`` in evaluation mode, BF16; the same weights for the same seed.

    Args:
        device: where its weights are made; CPU and GPU make different ones.
        seed: of the weights.
        changes: entries of the configuration that differ from ``WAN_2_2``.
    """
    from diffusers import AutoencoderKLWan

    config = {**WAN_2_2, **changes}
    z_dim = config["z_dim"]
    with torch.device("meta"):
        vae = AutoencoderKLWan(**config, latents_mean=[0.0] * z_dim, latents_std=[1.0] * z_dim)
    nn.Module.to(vae, DTYPE).to_empty(device=device)  # made in BF16: FP32 would take twice as much
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):  # as torch begins
                bound = module.weight[0].numel() ** -0.5
                for parameter in module.parameters():
                    parameter.uniform_(-bound, bound, generator=generator)
            elif hasattr(module, "gamma"):  # ones would hide a norm with another's gamma
                module.gamma.uniform_(0.5, 1.5, generator=generator)
    return vae.eval()
