# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.run [BENCH ...]``: check, time, print and write benchmarks."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from benchmarks.harness import environment, report, results
from benchmarks.harness.case import Bench, Case, Lab, Outcome, select
from benchmarks.harness.ceilings import copy_bandwidth_gb_s, matmul_tflop_s
from benchmarks.harness.goals import verdicts
from benchmarks.harness.precompile import precompile
from benchmarks.harness.timing import GraphTimer
from cudnn_blocks.errors import CudaUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHES = {
    name: f"benchmarks.{name}"
    for name in (
        "causal_conv1d_update",
        "conv3d",
        "dequant_gemm",
        "fla_short_convolution",
        "gated_attention_block",
        "gated_attention_precision",
        "qwen3_next_attention",
        "rmsnorm_silu_pad",
        "time_to_first_result",
        "wan_vae_encode",
    )
}
"""Name to module; each module holds ``BENCH``."""


class NoGpu(click.ClickException):
    """Nothing here to time on; status 2, so that status 1 means a wrong result."""

    exit_code = 2


def load(name: str) -> Bench:
    """Imports one bench; peers and kernels stay unimported until a case runs."""
    return import_module(BENCHES[name]).BENCH


def open_lab(rounds: int, *, check_only: bool, is_sustained: bool = False) -> Lab:
    """Measures the ceiling and sets up the timer, or raises CudaUnavailableError."""
    l2_bytes = environment.require_gpu().L2_cache_size
    if check_only:
        return Lab(rounds, l2_bytes, ceiling_gb_s=None, timer=None, check_only=True)
    return Lab(
        rounds,
        l2_bytes,
        copy_bandwidth_gb_s(),
        GraphTimer(l2_bytes),
        peak_tflop_s=matmul_tflop_s(),
        is_sustained=is_sustained,
    )


def document_of(
    bench: Bench,
    outcome: Outcome,
    clocks: tuple[int | None, int | None],
    selection: dict[str, str],
    *,
    is_sustained: bool = False,
) -> results.Document:
    """The result file's content."""
    peers, missing = environment.peer_versions(bench.peer_distributions)
    return results.Document(
        gpu=torch.cuda.get_device_name(),
        driver=environment.driver(),
        torch=torch.__version__,
        dsl=environment.version_of("nvidia-cutlass-dsl"),
        peers=peers,
        missing_peers=missing,
        commit=environment.commit(),
        sm_clock_mhz=clocks,
        selection=selection,
        is_sustained=is_sustained,
        rows=outcome.rows,
        compile_counts=outcome.compile_counts,
    )


def run_bench(
    bench: Bench,
    cases: Sequence[Case],
    lab: Lab,
    selection: dict[str, str],
    out: Path,
    jobs: int = 1,
) -> bool:
    """Runs one bench, prints it and writes it; True where all our arms are right.

    The file is written anew after every case, so a run that is cut short keeps what it measured.
    """
    plans = [plan for case in cases for plan in case.plans()]
    if plans:
        click.echo(f"{bench.name}: {precompile(plans, jobs)}", err=True)
    before = environment.sm_clock_mhz()
    total = Outcome()
    document = document_of(bench, total, (before, None), selection, is_sustained=lab.is_sustained)
    path = None
    for case in track(cases, f"{bench.name} cases", console=Console(stderr=True)):
        with torch.no_grad():
            outcome = case.measure(lab)
        gc.collect()
        torch.cuda.empty_cache()
        total.rows.extend(outcome.rows)
        total.compile_counts.extend(outcome.compile_counts)
        total.descriptions.extend(outcome.descriptions)
        measured = {
            "rows": total.rows,
            "compile_counts": total.compile_counts,
            "verdicts": verdicts(bench.goals, total.rows, is_whole=False),
        }
        document = document.model_copy(update=measured)
        if not lab.check_only:
            path = results.write(document, bench.name, out)
    clocks = (before, environment.sm_clock_mhz())
    judged = verdicts(bench.goals, total.rows, is_whole=not selection)
    document = document.model_copy(update={"sm_clock_mhz": clocks, "verdicts": judged})
    if path is not None:
        results.write(document, bench.name, out)
    console = report.console()
    title = (
        f"{bench.name} on {document.gpu}, driver {document.driver}, torch {document.torch}, "
        f"DSL {document.dsl}, peers {document.peers}, commit {document.commit}, "
        f"SM MHz {document.sm_clock_mhz}"
    )
    console.print(report.table(document.rows, escape(title)))
    for line in [*dict.fromkeys(total.descriptions), *report.summary(document)]:
        console.print(line, markup=False, highlight=False)
    if path is not None:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    return not total.ours_failed


@click.command()
@click.argument("benches", nargs=-1, type=click.Choice(sorted(BENCHES)), metavar="[BENCH ...]")
@click.option("--case", "case_pattern", help="Glob over case names, or a part of one.")
@click.option("--shape", "shape_pattern", help="Glob over shapes, or a part of one.")
@click.option(
    "--rounds", default=7, show_default=True, type=click.IntRange(min=1), help="Rounds per arm."
)
@click.option(
    "--out",
    default=results.RESULTS,
    type=click.Path(path_type=Path, file_okay=False),
    help="Results folder.",
)
@click.option(
    "--sustained",
    "is_sustained",
    is_flag=True,
    help="Run every arm for 50 ms, untimed, right before each measurement: clocks of steady load.",
)
@click.option("--list", "list_only", is_flag=True, help="Print the selected cases; needs no GPU.")
@click.option("--check-only", is_flag=True, help="Check every arm, time nothing, write nothing.")
@click.option(
    "--jobs",
    default=min(os.cpu_count() or 1, 16),
    show_default="one a core",
    type=click.IntRange(min=1),
    help="Processes that compile our kernels ahead; 1 compiles each where it is first needed.",
)
def main(
    benches: tuple[str, ...],
    case_pattern: str | None,
    shape_pattern: str | None,
    rounds: int,
    out: Path,
    is_sustained: bool,
    list_only: bool,
    check_only: bool,
    jobs: int,
) -> None:
    """Times BENCH (all of them by default) against its peers and writes the results as JSON."""
    selection = {
        name: pattern
        for name, pattern in (("case", case_pattern), ("shape", shape_pattern))
        if pattern
    }
    chosen = [load(name) for name in benches or sorted(BENCHES)]
    grids = [(bench, select(bench.cases, case_pattern, shape_pattern)) for bench in chosen]
    if not any(cases for _, cases in grids):
        raise click.BadParameter(f"no case matches {selection}; --list shows them all")
    if list_only:
        for bench, cases in grids:
            for case in cases:
                click.echo(f"{bench.name}  {'|'.join(case.kinds)}/{case.label}")
        return
    try:
        lab = open_lab(rounds, check_only=check_only, is_sustained=is_sustained)
    except CudaUnavailableError as error:
        raise NoGpu(f"{type(error).__name__}: {error}") from error
    right = [run_bench(bench, cases, lab, selection, out, jobs) for bench, cases in grids if cases]
    sys.exit(0 if all(right) else 1)


if __name__ == "__main__":
    main()
