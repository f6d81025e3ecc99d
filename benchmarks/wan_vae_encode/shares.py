# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.wan_vae_encode.shares``: where the time of an accelerated encode goes.

Profiled apart from the speed-up, as tracing slows launches down. Kernels on torch's side are listed
by what they do; the rest of the span is time without a kernel.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import environment, results
from benchmarks.harness.kernels import CUDNN_MARKS, short_name
from benchmarks.wan_vae_encode.problem import HEIGHT, WIDTH, EncodeProblem, encode
from cudnn_blocks.integrations.diffusers import accelerate_vae_encoder

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("cudnn_blocks: convolutions", ("conv3dkernel", "causalconv")),
    ("cudnn_blocks: norms and packing", ("cudnn_blocks",)),
    ("torch: cuDNN", CUDNN_MARKS),
    ("torch: products of matrices", ("nvjet", "gemm", "cutlass")),
    ("torch: copies and fills", ("copy", "memcpy", "memset", "fill", "cat")),
    ("torch: reductions", ("reduce", "softmax", "norm")),
    ("torch: the rest", ("",)),
)
"""Group to parts of kernel names in lower case, the first match counts."""
TOP = 12


def group_of(kernel: str) -> str:
    """The group of a kernel by its name."""
    name = kernel.lower()
    return next(group for group, marks in GROUPS if any(mark in name for mark in marks))


def trace(vae: object, video: torch.Tensor) -> tuple[Counter[str], float]:
    """Microseconds by kernel of one encode after a first one, and of the whole span."""
    encode(vae, video)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        encode(vae, video)
        torch.cuda.synchronize()
    events = [
        event
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Sync" not in event.name
    ]
    kernels: Counter[str] = Counter()
    for event in events:
        kernels[event.name] += event.time_range.elapsed_us()
    ranges = [event.time_range for event in events]
    return kernels, max(one.end for one in ranges) - min(one.start for one in ranges)


def shares_of(kernels: Counter[str], span_us: float) -> list[dict[str, object]]:
    """A row per group, and one for the time in which no kernel ran."""
    groups: Counter[str] = Counter()
    for name, us in kernels.items():
        groups[group_of(name)] += us
    groups["no kernel"] = max(span_us - sum(kernels.values()), 0.0)
    return [
        {"group": group, "us": round(us, 1), "share": round(us / span_us, 4)}
        for group, us in groups.most_common()
    ]


def show(frames: int, rows: Sequence[dict[str, object]], kernels: Counter[str]) -> None:
    """Prints both tables."""
    console = Console(width=160)
    groups = Table("group", "us", "share", title=f"{HEIGHT}x{WIDTH}x{frames}")
    for row in rows:
        groups.add_row(str(row["group"]), f"{row['us']:,}", f"{row['share']:.1%}")
    console.print(groups)
    longest = Table("kernels on torch", "us")
    on_torch = Counter({name: us for name, us in kernels.items() if "torch" in group_of(name)})
    for name, us in on_torch.most_common(TOP):
        longest.add_row(short_name(name), f"{us:,.1f}")
    console.print(longest)


@click.command()
@click.option("--frames", default=17, show_default=True, type=click.IntRange(min=1))
@click.option("--out", default=results.RESULTS, type=click.Path(path_type=Path, file_okay=False))
def main(frames: int, out: Path) -> None:
    """Profiles one encode and writes the shares as JSON beside the benchmark's results."""
    environment.require_gpu()
    problem = EncodeProblem(frames)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, benchmark=True):
        vae = problem.model("cuda")
        accelerate_vae_encoder(vae).warm(problem.height, problem.width)
        kernels, span_us = trace(vae, problem.make_set("cuda")["video"])
    rows = shares_of(kernels, span_us)
    show(frames, rows, kernels)
    gpu = torch.cuda.get_device_name()
    path = out / results.gpu_slug(gpu) / f"wan_vae_encode_shares_{frames}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "gpu": gpu,
        "torch": torch.__version__,
        "commit": environment.commit(),
        "shape": problem.shape,
        "span_us": round(span_us, 1),
        "rows": rows,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    click.echo(f"wrote {path}")


if __name__ == "__main__":
    main()
