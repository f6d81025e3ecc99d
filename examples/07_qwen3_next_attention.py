# SPDX-License-Identifier: Apache-2.0
"""A full-attention layer of Qwen3-Next in transformers, and the same layer on our block.

The layer is transformers' own module with seeded random weights in the sizes of
Qwen3-Next-80B-A3B, or a layer of a local checkpoint. One call accelerates it; both results are
compared with the layer in FP32, a call that the block does not take runs the original and is
counted, and ``restore()`` gives the first bits back. Nothing is downloaded::

    python examples/07_qwen3_next_attention.py --tokens 8192
    python examples/07_qwen3_next_attention.py --model /path/to/Qwen3-Next-80B-A3B-Instruct
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from cudnn_blocks.integrations.transformers import accelerate_gated_attention

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS = {"cuda": 8192, "cpu": 32}
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3}
"""Largest root-mean-square error against FP32, relative to the result's own."""
TIMED_RUNS, WARM_UP_RUNS = 20, 3
Tables = tuple[torch.Tensor, torch.Tensor]


def modeling() -> Any:
    """Qwen3-Next of transformers, or an error that says how to get it."""
    try:
        from transformers.models.qwen3_next import modeling_qwen3_next
    except ImportError as error:
        raise click.ClickException(
            f"{error}; install the extra: pip install 'cudnn_blocks[transformers]'"
        ) from error
    return modeling_qwen3_next


def random_layer() -> torch.nn.Module:
    """The published sizes, seeded weights that keep activations near 1."""
    code = modeling()
    config = code.Qwen3NextConfig()
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    layer = code.Qwen3NextAttention(config, layer_idx=0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.1)
    return layer


def load_layer(path: Path) -> torch.nn.Module:
    """The first full-attention layer of a checkpoint in safetensors files."""
    from safetensors import safe_open

    code = modeling()
    config = code.Qwen3NextConfig.from_pretrained(path)
    config._attn_implementation = "sdpa"
    index = config.layer_types.index("full_attention")
    prefix, weights = f"model.layers.{index}.self_attn.", {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            names = [name for name in stored.keys() if name.startswith(prefix)]  # noqa: SIM118
            weights.update({name[len(prefix) :]: stored.get_tensor(name) for name in names})
    layer = code.Qwen3NextAttention(config, layer_idx=index)
    layer.load_state_dict(weights)
    return layer


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the error over that of the result."""
    error = (out.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    return error.item()


def inputs(layer: Any, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, Tables]:
    """Seeded hidden states, and the tables of the model's own rotary embedding."""
    device = layer.q_proj.weight.device
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(1, tokens, layer.q_proj.in_features, generator=generator).to(device, dtype)
    rotary = modeling().Qwen3NextRotaryEmbedding(layer.config).to(device)
    return h, rotary(h, torch.arange(tokens, device=device)[None])


def check(layer: torch.nn.Module, h: torch.Tensor, tables: Tables, limit: float) -> bool:
    """Prints a verdict per path; True where all hold."""
    exact_layer = copy.deepcopy(layer).float()
    exact = exact_layer(h.float(), tuple(table.float() for table in tables), None)[0]
    del exact_layer
    before = layer(h, tables, None)[0]
    acceleration = accelerate_gated_attention(layer)
    print(acceleration.explain())
    ours = layer(h, tables, None)[0]
    mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool, device=h.device).tril()
    masked = layer(h, tables, mask[None, None])[0]
    stats = acceleration.stats()
    acceleration.restore()
    verdicts = {}
    for name, out in (("transformers", before), ("block", ours), ("with a mask", masked)):
        error = relative_error(out, exact)
        verdicts[f"{name}: relative error {error:.1e} against FP32"] = error <= limit
    verdicts[f"calls: {stats.accelerated} accelerated, original {dict(stats.original)}"] = (
        stats.accelerated == 1 and sum(stats.original.values()) == 1
    )
    same = torch.equal(layer(h, tables, None)[0], before)
    verdicts["restored: the bits of before"] = same
    for verdict, is_good in verdicts.items():
        print(f"{'ok' if is_good else 'WRONG'}  {verdict}")
    return all(verdicts.values())


def median_us(call: Callable[[], object], device: torch.device) -> float:
    """Median time of a call, its launches waited for."""
    times = []
    for i in range(WARM_UP_RUNS + TIMED_RUNS):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= WARM_UP_RUNS:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e6


def time_it(layer: torch.nn.Module, h: torch.Tensor, tables: Tables) -> None:
    """Prints the time of the layer before and after."""
    theirs = median_us(lambda: layer(h, tables, None), h.device)
    acceleration = accelerate_gated_attention(layer)
    ours = median_us(lambda: layer(h, tables, None), h.device)
    acceleration.restore()
    print(f"{h.shape[1]} tokens: transformers {theirs:,.0f} us, block {ours:,.0f} us")


@click.command(context_settings={"show_default": True})
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="local checkpoint; default: seeded random weights")  # fmt: skip
@click.option("--tokens", type=click.IntRange(min=1), help="length; 8192, 32 on the CPU")
@click.option("--dtype", type=click.Choice([*DTYPES]), default="bf16")
@click.option("--device", type=click.Choice([*TOKENS]), help="default: a GPU if there is one")
@click.option("--check-only", is_flag=True, help="print no timing")
def main(
    model: Path | None, tokens: int | None, dtype: str, device: str | None, check_only: bool
) -> None:
    """Accelerates a layer of transformers, checks it and times both."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with torch.no_grad():
        layer = random_layer() if model is None else load_layer(model)
        layer = layer.eval().to(where, DTYPES[dtype])
        h, tables = inputs(layer, tokens or TOKENS[where.type], DTYPES[dtype])
        is_good = check(layer, h, tables, TOLERANCE[dtype])
        if not check_only:
            time_it(layer, h, tables)
    print("PASSED" if is_good else "FAILED")
    if not is_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
