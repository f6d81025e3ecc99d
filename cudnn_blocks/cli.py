# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m cudnn_blocks``. It needs no GPU."""

from __future__ import annotations

import json

import click

from cudnn_blocks import __version__
from cudnn_blocks.cli_cache import cache
from cudnn_blocks.cli_compile import compile_command
from cudnn_blocks.cli_probe import probe
from cudnn_blocks.deploy import deploy_schema
from cudnn_blocks.support import reports_schema


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message=f"cudnn_blocks {__version__}")
def main() -> None:
    """Fused GPU operations and model blocks: what is served where, compiled ahead of time."""


@main.command()
@click.argument("name", type=click.Choice(["deploy", "probe"]))
def schema(name: str) -> None:
    """Print the JSON schema of deploy files, or of what probe --json prints."""
    made = deploy_schema() if name == "deploy" else reports_schema()
    click.echo(json.dumps(made, indent=2))


for _command in (cache, compile_command, probe):
    main.add_command(_command)
