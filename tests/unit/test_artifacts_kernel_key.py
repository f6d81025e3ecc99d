# SPDX-License-Identifier: Apache-2.0
"""Keys on disk: the same in every process, and different wherever the code could be."""

from __future__ import annotations

import ast
import enum
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cudnn_blocks
from cudnn_blocks import CausalConv1dGeometry, SdpaGeometry
from cudnn_blocks.artifacts import kernel_key as keys
from cudnn_blocks.artifacts.kernel_key import (
    KERNEL_SOURCES,
    UnstableKeyError,
    canonical,
    fingerprint_of,
    kernel_key,
    source_fingerprint,
)
from cudnn_blocks.stages.stage import Stage

PACKAGE = Path(cudnn_blocks.__file__).parent
GEOMETRY = CausalConv1dGeometry(8, 4, 4)


def test_different_values_have_different_texts():
    values = [
        None, 0, 1, True, False, 1.0, 0.0, -0.0, "1", "", b"1", (), (1,), (1, 2), ((1,), 2),
        (1, (2,)), ("1,2",), ("1", "2"), [1], {1: 2}, {"1": 2}, {1}, frozenset({1}), GEOMETRY,
        CausalConv1dGeometry(8, 4, 3), CausalConv1dGeometry, Stage, Stage.check, SdpaGeometry,
    ]  # fmt: skip
    assert len({canonical(value) for value in values}) == len(values)


def test_order_counts_where_it_means_something():
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    assert canonical({"a", "b", "c"}) == canonical({"c", "b", "a"})
    assert canonical(("a", "b")) != canonical(("b", "a"))


def test_another_process_spells_it_alike():
    program = (
        "from cudnn_blocks.artifacts.kernel_key import kernel_key; "
        "from cudnn_blocks import CausalConv1dGeometry; "
        "print(kernel_key((CausalConv1dGeometry(8, 4, 4), {'a', 'b'}, 'sm_90a'), {'dsl': '1'}))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(PACKAGE.parent)},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert texts == {kernel_key((GEOMETRY, {"b", "a"}, "sm_90a"), {"dsl": "1"})}


class Ours(enum.Enum):
    A = 1


def local():
    return None


@pytest.mark.parametrize(
    "value", [object(), lambda: None, Ours.A, Ours, local, Path(), (1, object())]
)
def test_what_has_no_text_or_foreign_code_is_refused(value):
    with pytest.raises(UnstableKeyError):
        canonical(value)


def test_every_fact_changes_the_key():
    keys = [
        kernel_key(("a", "sm_90a"), {"dsl": "1"}),
        kernel_key(("b", "sm_90a"), {"dsl": "1"}),
        kernel_key(("a", "sm_80"), {"dsl": "1"}),
        kernel_key(("a", "sm_90a"), {"dsl": "2"}),
        kernel_key(("a", "sm_90a"), {"dsl": "1", "CUTE_DSL_LINEINFO": "1"}),
    ]
    assert len(set(keys)) == len(keys)
    assert all(source_fingerprint() in key for key in keys)


def test_any_change_of_a_source_changes_the_fingerprint(tmp_path):
    copy = tmp_path / "cudnn_blocks"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    whole = fingerprint_of(copy)
    assert whole == fingerprint_of(PACKAGE)
    found = {whole}
    for name in ("stages/device/sigmoid.py", "geometry/conv3d.py", "target.py"):
        path = copy / name
        text = path.read_text()
        path.write_text(text + "\n")
        found.add(fingerprint_of(copy))
        path.write_text(text)
    (copy / "stages" / "new.py").write_text("")
    found.add(fingerprint_of(copy))
    assert len(found) == 5
    (copy / "stages" / "gone.py").symlink_to(copy / "nowhere.py")
    with pytest.raises(UnstableKeyError, match=r"gone\.py cannot be read: .*No such file"):
        fingerprint_of(copy)
    shutil.rmtree(copy / "geometry")
    with pytest.raises(UnstableKeyError, match="no sources in"):
        fingerprint_of(copy)


def test_kernels_import_nothing_that_the_fingerprint_leaves_out():
    """Stage files may: what they hand on to a kernel is in its config. Errors are no code."""
    covered = tuple(f"cudnn_blocks.{name.removesuffix('.py')}" for name in KERNEL_SOURCES)
    files = [
        path
        for path in (PACKAGE / "stages").rglob("*.py")
        if path.name.endswith("config.py")
        or (
            any("cutlass" in name for name in imports_of(path))
            and path.name not in ("kernel_cache.py", "kernel_store.py")
        )
    ]
    assert len(files) > 20
    for path in files:
        ours = {name for name in imports_of(path) if name.startswith("cudnn_blocks")}
        left_out = {name for name in ours if not name.startswith(covered)}
        assert left_out <= {"cudnn_blocks.errors"}, path


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_sources_edited_under_a_process_keep_its_kernels_off_the_disk(monkeypatch):
    kernel_key("a", {})
    monkeypatch.setattr(keys, "_STAMP", [])
    with pytest.raises(UnstableKeyError, match="sources have changed"):
        kernel_key("a", {})
