# SPDX-License-Identifier: Apache-2.0
"""``python -m cudnn_blocks cache stats|clear``."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from cudnn_blocks.artifacts import CACHE_VARIABLE, DiskCache, disk_cache
from cudnn_blocks.cli import main


@pytest.fixture
def cache(monkeypatch, tmp_path) -> DiskCache:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    found = disk_cache()
    found.put("a", lambda path: path.write_bytes(b"kernel"))
    return found


def run(*arguments: str):
    result = CliRunner().invoke(main, ["cache", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_stats(cache):
    assert str(cache.folder) in run("stats")
    assert "kernels  1\n" in run("stats")
    found = json.loads(run("stats", "--json"))
    assert (found["folder"], found["entries"]) == (str(cache.folder), 1)
    assert found["size_bytes"] > len(b"kernel")


def test_clear(cache):
    assert run("clear").startswith("removed 1 kernels")
    assert cache.stats().entries == 0
    assert "kernels  0\n" in run("stats")


def test_a_clear_that_fails_says_so(cache, monkeypatch):
    monkeypatch.setattr(DiskCache, "clear", DiskCache.stats)
    result = CliRunner().invoke(main, ["cache", "clear"])
    assert result.exit_code == 1
    assert "1 of 1 kernels" in result.output


def test_disabled(monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert "disabled" in run("stats")
    assert "disabled" in run("clear")
    assert json.loads(run("stats", "--json")) is None
