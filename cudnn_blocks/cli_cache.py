# SPDX-License-Identifier: Apache-2.0
"""``python -m cudnn_blocks cache stats|clear``."""

from __future__ import annotations

import dataclasses
import json

import click

from cudnn_blocks.artifacts import CACHE_VARIABLE, DiskCache, disk_cache

_MIB = 1 << 20


@click.group()
def cache() -> None:
    """The compiled kernels on disk."""


@cache.command()
@click.option("--json", "as_json", is_flag=True, help="JSON instead of text")
def stats(as_json: bool) -> None:
    """Where the cache is, how many kernels it holds, and their size."""
    found = disk_cache()
    if found is None:
        click.echo(json.dumps(None) if as_json else _disabled())
    elif as_json:
        click.echo(json.dumps(dataclasses.asdict(found.stats()), indent=2))
    else:
        click.echo(f"folder   {found.folder}\n{_sizes(found)}")


@cache.command()
def clear() -> None:
    """Remove every kernel; running processes keep what they have loaded."""
    found = disk_cache()
    if found is None:
        click.echo(_disabled())
        return
    before = found.clear()
    left = found.stats().entries
    if left:
        raise click.ClickException(f"{left} of {before.entries} kernels in {found.folder} remain")
    click.echo(f"removed {before.entries} kernels, {before.size_bytes / _MIB:.1f} MiB")


def _disabled() -> str:
    return f"the kernel cache is disabled ({CACHE_VARIABLE}), or there is no folder for it"


def _sizes(found: DiskCache) -> str:
    now = found.stats()
    size, limit = now.size_bytes / _MIB, now.limit_bytes / _MIB
    return f"kernels  {now.entries}\nsize     {size:.1f} of {limit:.0f} MiB"
