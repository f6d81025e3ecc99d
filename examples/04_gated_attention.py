# SPDX-License-Identifier: Apache-2.0
"""A gated attention layer of Qwen3-Next as one plan: five stages, or three, and one workspace.

The weights are random in the layout of a Hugging Face checkpoint and turned into the block's. The
block is built once for the longest prompt and serves every shorter one; on a GPU it runs eager and
from a CUDA graph, which must agree bit for bit. The result is checked against the layer in plain
FP32 torch. The stage table says which engine runs what, and a picture shows the workspace, drawn to
scale. Without a GPU, short prompts run on the ``reference`` engine::

    python examples/04_gated_attention.py --tokens 4096 --picture workspace.svg
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from cudnn_blocks import (
    GatedAttentionBlockFwd,
    GatedAttentionGeometry,
    ProjBlock,
    TensorSpec,
    qkvg_from_hf,
)
from cudnn_blocks.workspace import WorkspaceLayout

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BITS = torch.int16
ROPE_THETA = 1e7
TOKENS = {"cuda": 4096, "cpu": 32}
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3}
"""Largest root-mean-square error against FP32, relative to the result's own."""
TIMED_RUNS, WARM_UP_RUNS = 20, 3
COLORS = ("#4c78a8", "#f2a541", "#59a14f", "#b07aa1", "#9c9c9c")
BAR_WIDTH, BAR_HEIGHT, ROW_HEIGHT, MARGIN = 900, 46, 110, 24


@dataclass
class Layer:
    """What a checkpoint holds of the layer, and the rotary tables."""

    geometry: GatedAttentionGeometry
    q_proj: torch.Tensor
    k_proj: torch.Tensor
    v_proj: torch.Tensor
    o_proj: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def random(cls, tokens: int, dtype: torch.dtype, device: torch.device) -> Layer:
        """Qwen3-Next-80B-A3B's sizes, seeded weights that keep activations near 1."""
        one = GatedAttentionGeometry(d_model=2048, h_q=16, h_kv=2, d_head=256, rope_dim=64)
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, std: float) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * std).to(device, dtype)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return normal(rows, columns, std=columns**-0.5)

        rate = ROPE_THETA ** (-torch.arange(0, one.rope_dim, 2) / one.rope_dim)
        angles = (torch.arange(tokens)[:, None] * rate).repeat(1, 2)[None]
        return cls(
            one,
            matrix(2 * one.attn_width, one.d_model),
            matrix(one.h_kv * one.d_head, one.d_model),
            matrix(one.h_kv * one.d_head, one.d_model),
            matrix(one.d_model, one.attn_width),
            normal(one.d_head, std=0.1),
            normal(one.d_head, std=0.1),
            angles.cos().to(device, dtype),
            angles.sin().to(device, dtype),
        )

    def plain(self, h: torch.Tensor) -> torch.Tensor:
        """The layer in FP32, as a modelling file has it; nothing of this package."""
        one, (batch, tokens, _) = self.geometry, h.shape
        q_gate = F.linear(h.float(), self.q_proj.float()).view(batch, tokens, one.h_q, -1)
        q, gate = q_gate.chunk(2, dim=-1)
        k, v = (
            F.linear(h.float(), w.float()).view(batch, tokens, one.h_kv, one.d_head)
            for w in (self.k_proj, self.v_proj)
        )
        q, k = (
            self._rotate(F.rms_norm(x, (one.d_head,), 1 + w.float(), one.qk_norm_eps))
            for x, w in ((q, self.q_norm), (k, self.k_norm))
        )
        heads = (x.transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        o = o.transpose(1, 2).reshape(batch, tokens, -1)
        return F.linear(o * gate.reshape(batch, tokens, -1).sigmoid(), self.o_proj.float())

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        tokens, turned = x.shape[1], self.geometry.rope_dim
        cos, sin = (table[:, :tokens, None].float() for table in (self.cos, self.sin))
        first, second = x[..., :turned].chunk(2, dim=-1)
        rotated = x[..., :turned] * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((rotated, x[..., turned:]), dim=-1)


class Runner:
    """One block for up to ``tokens`` tokens, its weights and its workspace."""

    def __init__(self, layer: Layer, tokens: int, *, is_fused: bool) -> None:
        one, dtype, device = layer.geometry, layer.q_proj.dtype, layer.q_proj.device
        packed = qkvg_from_hf(
            layer.q_proj, layer.k_proj, layer.v_proj, layer.q_norm, layer.k_norm, one
        )
        self.weights = (*packed, layer.cos, layer.sin, layer.o_proj)
        hidden = TensorSpec.contiguous((1, tokens, one.d_model), dtype, device)
        self.block = GatedAttentionBlockFwd(
            hidden, *self.weights, hidden, one, fuse_norm_rope=is_fused, fuse_gate=is_fused
        )
        self.block.compile()
        size_bytes = self.block.get_workspace_size()
        self.workspace = torch.empty(size_bytes, dtype=torch.uint8, device=device)

    def run(self, h: torch.Tensor, out: torch.Tensor) -> None:
        """Launches only; nothing is allocated on a GPU."""
        self.block.execute(h, *self.weights, out, self.workspace)

    def capture(self, h: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """The call as a CUDA graph; a replay reads whatever ``h`` holds by then."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(h, out)
        return graph.replay


def stage_table(runners: dict[str, Runner]) -> Table:
    """Every stage, its engine and how that was validated, per pipeline."""
    table = Table("pipeline", "stage", "engine", "validated", "shared memory")
    for name, runner in runners.items():
        for stage in runner.block.probe().stages:
            status, _, _ = str(stage.status).partition(":")
            smem = f"{stage.smem_bytes:,} B" if stage.smem_bytes else "-"
            table.add_row(name, stage.stage, stage.engine, status, smem)
        table.add_section()
    return table


def draw_workspace(layout: WorkspaceLayout, geometry: GatedAttentionGeometry, title: str) -> str:
    """An SVG of the workspace, one row per region, bytes to scale, the slab's bands in colour."""
    scale = BAR_WIDTH / max(layout.size_bytes, 1)
    widths = geometry.qkvg_block_widths
    columns = ", ".join(f"{band.name} {widths[band]}" for band in ProjBlock)
    parts, y = [_text(MARGIN, MARGIN + 8, title, 16)], MARGIN + 34
    for region in layout.regions:
        label = f"{region.name}: {region.size_bytes:,} bytes at {region.offset_bytes:,}"
        x, width = MARGIN + region.offset_bytes * scale, region.size_bytes * scale
        bars = [(region.name, width, COLORS[-1])]
        if region.name == "proj":
            label += f", columns {columns}"
            bars = [
                (band.name, width * widths[band] / geometry.n_qkvg, COLORS[band])
                for band in ProjBlock
            ]
        parts += [_text(MARGIN, y, label, 13), _bar(MARGIN, y + 8, BAR_WIDTH, "#f1f1f1", "")]
        for name, bar_width, color in bars:
            parts.append(_bar(x, y + 8, bar_width, color, name))
            x += bar_width
        y += ROW_HEIGHT
    size = f'width="{BAR_WIDTH + 2 * MARGIN}" height="{y - MARGIN}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *parts, "</svg>", ""])


def _bar(x: float, y: float, width: float, color: str, label: str) -> str:
    rectangle = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR_HEIGHT}"'
    name = _text(x + 4, y + 28, label, 12) if label and width > 10 * len(label) else ""
    return f'{rectangle} fill="{color}"/>{name}'


def _text(x: float, y: float, text: str, size: int) -> str:
    style = f'font-family="sans-serif" font-size="{size}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def median_us(run: Callable[[], object], device: torch.device) -> float:
    """Median time of a call, its launches waited for."""
    times = []
    for i in range(WARM_UP_RUNS + TIMED_RUNS):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= WARM_UP_RUNS:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e6


def check(layer: Layer, runners: dict[str, Runner], lengths: Sequence[int], limit: float) -> bool:
    """Prints a verdict per pipeline and length; True where all are within the limit."""
    device, dtype = layer.q_proj.device, layer.q_proj.dtype
    generator, is_good = torch.Generator().manual_seed(1), True
    for tokens in lengths:
        shape = (1, tokens, layer.geometry.d_model)
        h = torch.randn(shape, generator=generator).to(device, dtype)
        expected = layer.plain(h)
        for name, runner in runners.items():
            out = torch.full_like(h, torch.nan)
            runner.run(h, out)
            error = (out.float() - expected).square().mean().sqrt().item()
            error /= expected.square().mean().sqrt().item()
            verdict = f"{name}, {tokens} tokens: relative error {error:.1e} against FP32 torch"
            is_good &= error <= limit  # False for NaN
            if device.type == "cuda":
                same = replay_agrees(runner, h, out)
                is_good &= same
                verdict += f"; CUDA graph {'bitwise equal' if same else 'DIFFERS'}"
            print(verdict)
    return is_good


def replay_agrees(runner: Runner, h: torch.Tensor, out: torch.Tensor) -> bool:
    """A graph captured on other contents gives the eager bits once ``h`` holds the same values."""
    captured_h, captured = torch.zeros_like(h), torch.full_like(out, torch.nan)
    replay = runner.capture(captured_h, captured)
    captured_h.copy_(h)
    replay()
    return torch.equal(captured.view(BITS), out.view(BITS))


def time_it(runners: dict[str, Runner], tokens: int) -> None:
    """Prints the time of a call, eager and replayed."""
    for name, runner in runners.items():
        h, *_ = runner.weights
        shape = (1, tokens, runner.block.geometry.d_model)
        x = torch.randn(shape, device=h.device).to(h.dtype)
        out = torch.empty_like(x)
        modes = {"eager": lambda r=runner, x=x, out=out: r.run(x, out)}
        if h.is_cuda:
            modes["CUDA graph"] = runner.capture(x, out)
        for mode, run in modes.items():
            print(f"{name}, {tokens} tokens, {mode}: {median_us(run, h.device):,.0f} us")


@click.command(context_settings={"show_default": True})
@click.option("--tokens", type=click.IntRange(min=1), help="longest prompt; 4096, 32 on the CPU")
@click.option("--dtype", type=click.Choice([*DTYPES]), default="bf16")
@click.option("--device", type=click.Choice([*TOKENS]), help="default: a GPU if there is one")
@click.option("--check-only", is_flag=True, help="print no timing")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("gated_attention_workspace.svg"),
)
def main(
    tokens: int | None, dtype: str, device: str | None, check_only: bool, picture: Path
) -> None:
    """Builds, checks and times a gated attention layer; draws its workspace."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    tokens = tokens or TOKENS[where.type]
    layer = Layer.random(tokens, DTYPES[dtype], where)
    runners = {
        "unfused": Runner(layer, tokens, is_fused=False),
        "fused": Runner(layer, tokens, is_fused=True),
    }
    if where.type == "cpu":
        print("On the CPU: short prompts on the `reference` engine, eager only.")
    block = runners["fused"].block
    print(block.describe())
    Console().print(stage_table(runners))
    title = f"Workspace of {block.op_name}, {tokens} tokens, {block.get_workspace_size():,} bytes"
    picture.write_text(
        draw_workspace(block.workspace_layout, layer.geometry, title), encoding="utf-8"
    )
    print(f"workspace map: {picture}")
    lengths = sorted({tokens, max(1, tokens // 2 - 3), 1}, reverse=True)
    is_good = check(layer, runners, lengths, TOLERANCE[dtype])
    if not check_only:
        time_it(runners, tokens)
    print("PASSED" if is_good else "FAILED: a result is too far from the layer in FP32")
    if not is_good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
