# SPDX-License-Identifier: Apache-2.0
"""WAN 2.2's video VAE of diffusers on the Conv3D family; needs ``cudnn_blocks[diffusers]``.

``accelerate_vae_encoder(vae)`` swaps the encoder of an ``AutoencoderKLWan`` for plans, in place.
The handle that it returns says what runs where (``explain()``), compiles for a size ahead of time
(``warm()``) and undoes it (``restore()``). ``accelerate_vae_decoder`` does the same to the decoder.
"""

from cudnn_blocks.integrations.diffusers.accelerate import (
    AcceleratedVae,
    accelerate_vae_decoder,
    accelerate_vae_encoder,
)
from cudnn_blocks.integrations.diffusers.random_model import WAN_2_2, random_model

__all__ = [
    "WAN_2_2",
    "AcceleratedVae",
    "accelerate_vae_decoder",
    "accelerate_vae_encoder",
    "random_model",
]
