# SPDX-License-Identifier: Apache-2.0
"""``AutoencoderKLWan._encode`` with several chunks a call, so that small layers get more work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cudnn_blocks.integrations.calls import ReplacedCall

GROUP_CHUNKS = 4
"""Chunks of a call to the encoder while as many are left, then one by one."""


class GroupedEncode(ReplacedCall):
    """The model's loop over a clip: its first frame alone, then groups of chunks.

    Args:
        vae: the model.
        chunk_frames: of every chunk but the first.
    """

    def __init__(self, vae: Any, chunk_frames: int) -> None:
        self._vae = vae
        self._own = vae._encode
        self._chunk_frames = chunk_frames

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The moments of a clip ``[N, C, T, H, W]``; incomplete chunks are dropped, as ever."""
        vae = self._vae
        if vae.use_tiling:
            moments: torch.Tensor = self._own(x)
            return moments
        from diffusers.models.autoencoders.autoencoder_kl_wan import patchify

        vae.clear_cache()
        if vae.config.patch_size is not None:
            x = patchify(x, patch_size=vae.config.patch_size)
        parts = [self._encode(x[:, :, start:stop]) for start, stop in self.spans(x.shape[2])]
        moments = vae.quant_conv(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
        vae.clear_cache()
        return moments

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        vae = self._vae
        vae._enc_conv_idx = [0]
        part: torch.Tensor = vae.encoder(
            x, feat_cache=vae._enc_feat_map, feat_idx=vae._enc_conv_idx
        )
        return part

    def spans(self, num_frames: int) -> Iterator[tuple[int, int]]:
        """First and last-but-one frame of every call for a clip of ``num_frames``."""
        yield 0, 1
        start, chunk = 1, self._chunk_frames
        while start + chunk <= num_frames:
            is_group = start + GROUP_CHUNKS * chunk <= num_frames
            stop = start + chunk * (GROUP_CHUNKS if is_group else 1)
            yield start, stop
            start = stop
