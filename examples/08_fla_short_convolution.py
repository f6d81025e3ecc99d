# SPDX-License-Identifier: Apache-2.0
"""Decode steps of flash-linear-attention's ``ShortConvolution``, with and without the adapter.

A stack of FLA's own modules with seeded random weights in the sizes of Qwen3-Next's 36
linear-attention layers, or with the short convolutions of a local checkpoint, decodes some tokens.
Outputs are compared with plain FP32 torch and the caches, which only move values, bit for bit; on a
GPU the same steps run through FLA's kernels. Nothing is downloaded::

    python examples/08_fla_short_convolution.py --batch 32
    python examples/08_fla_short_convolution.py --model /path/to/checkpoint --check-only
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import nn

from cudnn_blocks.integrations.flash_linear_attention import accelerate_short_convolutions

DTYPE = torch.bfloat16
LAYERS, CHANNELS, WIDTH = 36, 8192, 4
STEPS, TIMED_STEPS, WARM_UP_STEPS = 5, 50, 5
TOLERANCE = 2e-2
SUFFIX = "conv1d.weight"
"""Of the short convolutions' weights in a checkpoint, in FLA's models and in Qwen3-Next's."""


def short_convolution() -> Any:
    """FLA's module, or an error that says how to get it."""
    try:
        from fla.modules.causal_conv1d import ShortConvolution
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install the extra: pip install 'cudnn_blocks[fla]'"
        ) from error
    return ShortConvolution


def module_of(weight: torch.Tensor) -> nn.Module:
    """A ShortConvolution around ``[D, 1, W]``."""
    channels, _, width = weight.shape
    module = short_convolution()(channels, width, activation="silu", dtype=DTYPE)
    module.load_state_dict({"weight": weight.to(DTYPE)})
    return module


def random_layers(layers: int, channels: int) -> nn.ModuleList:
    """Seeded weights."""
    generator = torch.Generator().manual_seed(0)
    shape = (channels, 1, WIDTH)
    return nn.ModuleList(
        module_of(torch.randn(shape, generator=generator) / 2) for _ in range(layers)
    )


def load_layers(path: Path) -> nn.ModuleList:
    """Every short convolution without a bias of a checkpoint in safetensors files."""
    from safetensors import safe_open

    weights = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            names = [name for name in stored.keys() if name.endswith(SUFFIX)]  # noqa: SIM118
            weights.update({name: stored.get_tensor(name) for name in names})
    if not weights:
        raise click.ClickException(f"{path}: no safetensors file with *{SUFFIX}")
    return nn.ModuleList(map(module_of, weights.values()))


class Decode:
    """A stack of layers, a cache each, and the token that every step hands each of them."""

    def __init__(self, convs: nn.ModuleList, batch: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        self.convs = convs
        self.caches, self.tokens = (
            [torch.randn(shape(c), generator=generator).to(device, DTYPE) for c in convs]
            for shape in (
                lambda conv: (batch, conv.hidden_size, conv.kernel_size[0]),
                lambda conv: (batch, 1, conv.hidden_size),
            )
        )

    def step(self) -> list[torch.Tensor]:
        """One token through FLA's modules."""
        operands = zip(self.convs, self.tokens, self.caches, strict=True)
        return [conv(x, cache=cache, output_final_state=True)[0] for conv, x, cache in operands]

    def plain_step(self) -> list[torch.Tensor]:
        """The same in FP32 torch; nothing of FLA or of this package."""
        outputs = []
        for conv, x, cache in zip(self.convs, self.tokens, self.caches, strict=True):
            cache.copy_(torch.cat([cache[..., 1:], x.transpose(1, 2)], dim=-1))
            y = (cache.float() * conv.weight.float().squeeze(1)).sum(-1)
            outputs.append(F.silu(y)[:, None])
        return outputs

    def difference(self, other: Decode, *, is_plain: bool) -> str | None:
        """Steps both; None, or what is not alike. Every other step gets other tokens."""
        for step in range(STEPS):
            outputs, wanted = self.step(), other.plain_step() if is_plain else other.step()
            for i, (ours, theirs) in enumerate(zip(outputs, wanted, strict=True)):
                error = (ours.float() - theirs.float()).abs() / (1 + theirs.float().abs())
                if not error.max().item() <= TOLERANCE:
                    return f"step {step}, layer {i}: off by {error.max().item():.1e}"
                if not torch.equal(self.caches[i], other.caches[i]):
                    return f"step {step}, layer {i}: the caches differ"
        return None

    def step_us(self) -> tuple[float, float]:
        """Host microseconds of a step, and those until the device is done."""
        for _ in range(WARM_UP_STEPS):
            self.step()
        hosts, wholes = [], []
        for _ in range(TIMED_STEPS):
            if self.tokens[0].is_cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            self.step()
            hosts.append(time.perf_counter() - start)
            if self.tokens[0].is_cuda:
                torch.cuda.synchronize()
            wholes.append(time.perf_counter() - start)
        return tuple(sorted(times)[len(times) // 2] * 1e6 for times in (hosts, wholes))


@click.command(context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="local checkpoint; default: seeded random weights")  # fmt: skip
@click.option("--batch", type=click.IntRange(min=1), default=8, help="sequences")
@click.option("--layers", type=click.IntRange(min=1), default=LAYERS)
@click.option("--channels", type=click.IntRange(min=1), default=CHANNELS)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), help="default: a GPU if there is one")
@click.option("--check-only", is_flag=True, help="print no timing")
def main(
    model: Path | None,
    batch: int,
    layers: int,
    channels: int,
    device: str | None,
    check_only: bool,
) -> None:
    """Decodes with and without the adapter, compares and times."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with torch.no_grad():
        theirs = random_layers(layers, channels) if model is None else load_layers(model)
        theirs = theirs.eval().to(where)
        ours = copy.deepcopy(theirs)
        adapter = accelerate_short_convolutions(ours)
        if len(theirs) <= 4:
            print(adapter.explain())
        checks = {"plain FP32 torch": True}
        if where.type == "cuda":
            checks["FLA's kernels"] = False
        else:
            print("On the CPU: the adapter on the `reference` engine; FLA's kernels need a GPU.")
        is_good = True
        for name, is_plain in checks.items():
            decodes = (Decode(convs, batch, where) for convs in (ours, theirs))
            wrong = next(decodes).difference(next(decodes), is_plain=is_plain)
            print(f"{'WRONG' if wrong else 'ok'}  against {name}: {wrong or f'{STEPS} steps'}")
            is_good &= wrong is None
        if not check_only:
            arms = {"adapter": ours, **({"FLA": theirs} if where.type == "cuda" else {})}
            for name, convs in arms.items():
                host, whole = Decode(convs, batch, where).step_us()
                print(f"{name}: {len(convs)} layers, host {host:,.0f} us, whole {whole:,.0f} us")
        stats = adapter.stats()
    print(f"calls: {stats.accelerated} accelerated, original {dict(stats.original)}")
    is_good &= not stats.original
    print("PASSED" if is_good else "FAILED")
    if not is_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
