# SPDX-License-Identifier: Apache-2.0
"""Options, markers, the device axis and the lines that tests leave in the summary."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
import torch

SUMMARY_LINE = "summary_line"
"""Key of ``record_property`` for lines to print at the end of the run, also under xdist."""


def pytest_addoption(parser):
    parser.addoption(
        "--all-targets",
        action="store_true",
        help="codegen: compile for all ten targets, not for one per generation",
    )


def pytest_configure(config):
    # Before anything imports the CuTe DSL, which reads it once: kept cubins stay out of the tree.
    if "CUTE_DSL_DUMP_DIR" not in os.environ:
        config._dump_dir = tempfile.mkdtemp(prefix="cute_dsl_dump_")
        os.environ["CUTE_DSL_DUMP_DIR"] = config._dump_dir
    # Tests count compiles, and leave the user's cache alone.
    os.environ["CUDNN_BLOCKS_CACHE_DIR"] = "off"


def pytest_unconfigure(config):
    dump_dir = getattr(config, "_dump_dir", None)
    if dump_dir is not None:
        os.environ.pop("CUTE_DSL_DUMP_DIR", None)
        shutil.rmtree(dump_dir, ignore_errors=True)


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


@pytest.fixture(autouse=True)
def _fresh_start():
    """Same random numbers whatever ran before, and no plan left by another test."""
    from cudnn_blocks.plan_cache import PLANS

    torch.manual_seed(20)
    PLANS.clear()
    yield
    PLANS.clear()
