# SPDX-License-Identifier: Apache-2.0
"""Options, markers, the device axis and the lines that tests leave in the summary."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
import torch

CACHE_VARIABLE = "CUDNN_BLOCKS_CACHE_DIR"
SUMMARY_LINE = "summary_line"
"""Key of ``record_property`` for lines to print at the end of the run, also under xdist."""


def pytest_addoption(parser):
    parser.addoption(
        "--all-targets",
        action="store_true",
        help="codegen: compile for all ten targets, not for one per generation",
    )
    parser.addoption(
        "--share-kernels",
        action="store_true",
        help="xdist: a kernel that one worker has compiled is loaded by the others",
    )


def pytest_configure(config):
    # Before anything imports the CuTe DSL, which reads it once: kept cubins stay out of the tree.
    if "CUTE_DSL_DUMP_DIR" not in os.environ:
        config._dump_dir = tempfile.mkdtemp(prefix="cute_dsl_dump_")
        os.environ["CUTE_DSL_DUMP_DIR"] = config._dump_dir
    # Tests leave the user's cache alone; workers have the environment of the first process.
    if hasattr(config, "workerinput"):
        return
    os.environ[CACHE_VARIABLE] = "off"
    if config.getoption("--share-kernels"):
        config._kernels_dir = os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="kernels_")


def pytest_unconfigure(config):
    for name in ("_dump_dir", "_kernels_dir"):
        folder = getattr(config, name, None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if hasattr(config, "_dump_dir"):
        os.environ.pop("CUTE_DSL_DUMP_DIR", None)


def pytest_collection_modifyitems(config, items):
    """Without a GPU its tests are skipped; without a second one its tests do not exist."""
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices < 2:
        deselected = [item for item in items if item.get_closest_marker("two_gpus")]
        if deselected:
            config.hook.pytest_deselected(items=deselected)
            items[:] = [item for item in items if not item.get_closest_marker("two_gpus")]
    if num_devices == 0:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_terminal_summary(terminalreporter):
    lines = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        for name, value in report.user_properties
        if name == SUMMARY_LINE
    ]
    if lines:
        terminalreporter.section("what the tests say")
        for line in sorted(lines):
            terminalreporter.write_line(line)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """The CPU's reference engine everywhere, and the GPU's default engine where there is one."""
    return torch.device("cpu") if request.param == "cpu" else torch.device("cuda", 0)


@pytest.fixture
def no_disk_cache(monkeypatch):
    """For a test that counts compiles: what another process has compiled is compiled again."""
    monkeypatch.setenv(CACHE_VARIABLE, "off")


@pytest.fixture(autouse=True)
def _fresh_start():
    """Same random numbers whatever ran before, and no plan left by another test."""
    from cudnn_blocks.plan_cache import PLANS

    torch.manual_seed(20)
    PLANS.clear()
    yield
    PLANS.clear()
