# SPDX-License-Identifier: Apache-2.0
"""``python -m cudnn_blocks compile``: a deploy file's kernels into one bundle."""

from __future__ import annotations

from pathlib import Path

import click

from cudnn_blocks.artifacts import build_bundle
from cudnn_blocks.cli_probe import load_deploy_file, parse_targets, plan_of
from cudnn_blocks.errors import ContractError, DriverError, LinkError, NotServedError

_MIB = 1 << 20


@click.command("compile")
@click.option(
    "--file",
    "path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="a deploy file",
)
@click.option("--target", help="sm_90a, ...; by default the only one of the file")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="the bundle, such as model.cbb",
)
@click.option("--jobs", type=click.IntRange(min=1), help="worker processes; by default one a core")
@click.option("--json", "as_json", is_flag=True, help="print the manifest")
def compile_command(
    path: Path, target: str | None, output: Path, jobs: int | None, as_json: bool
) -> None:
    """Compile every kernel of a deploy file into a bundle; needs no GPU.

    Exit status: 0 written, 1 declined or not compiled, 2 bad file or bad arguments.
    """
    deploy = load_deploy_file(path)
    targets = [target] if target else list(deploy.targets)
    if len(targets) != 1:
        raise click.UsageError(f"--target: a bundle has one; the file names {targets or 'none'}")
    (chosen,) = parse_targets(targets)
    if chosen.is_cpu:
        raise click.UsageError("--target: the cpu has no kernels to compile")
    plans = []
    for label, request in zip(deploy.labels(), deploy.plans, strict=True):
        plan = plan_of(request, chosen, label)
        try:
            plan.check_support()
        except ContractError as error:
            raise click.UsageError(f"{label}: {error}") from None
        except NotServedError as error:
            raise click.ClickException(f"{label} on {chosen} declines: {error}") from None
        plans.append(plan)
    try:
        manifest = build_bundle(plans, output, jobs=jobs)
    except (DriverError, LinkError, OSError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(manifest.model_dump_json(indent=2))
    else:
        size = output.stat().st_size / _MIB
        click.echo(f"{output}: {len(manifest.kernels)} kernels for {chosen}, {size:.1f} MiB")
