# SPDX-License-Identifier: Apache-2.0
"""Capabilities rows, the choice of an engine, and the DSL at hand."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest

from cudnn_blocks import NotServedError, Target
from cudnn_blocks.stages import toolchain
from cudnn_blocks.stages.capabilities import AtLeast, Capabilities, OneOf
from cudnn_blocks.stages.stage import Stage
from cudnn_blocks.stages.toolchain import DSL_DISTRIBUTION, DslRequirement, dsl_version

HOPPER, AMPERE, CPU = (Target.parse(name) for name in ("sm_90a", "sm_80", "cpu"))


class TwoEngines(Stage):
    name = "toy"
    rows = (
        Capabilities(
            "fast", OneOf(("sm_90a",)), {"width": OneOf((2, 4))}, evidence={"sm_90a": "fast.json"}
        ),
        Capabilities("wide", OneOf(("sm_80", "sm_90a")), {"width": AtLeast(2)}),
        Capabilities("reference", OneOf(("cpu",)), {"width": AtLeast(1)}),
    )

    def compile(self): ...
    def run_reference(self, operands): ...
    def launch(self, operands, stream): ...
    def describe(self):
        return ""

    def smem_bytes(self):
        return 640


def toy(width, target=HOPPER, engine=None) -> TwoEngines:
    return TwoEngines({"width": width}, target, engine)


def checked(*args, **kw) -> TwoEngines:
    stage = toy(*args, **kw)
    stage.check()
    return stage


def test_constraints():
    assert 2 in OneOf((2, 4))
    assert 3 not in OneOf((2, 4))
    assert 3 in AtLeast(3)
    assert 2 not in AtLeast(3)
    assert "3" not in AtLeast(3)
    assert (str(OneOf((2, "a"))), str(AtLeast(3))) == ("2, a", "3 and up")


def test_the_first_row_that_serves_is_chosen():
    assert checked(4).engine == "fast"
    assert checked(3).engine == "wide"
    assert checked(4, AMPERE).engine == "wide"
    assert checked(1, CPU).engine == "reference"


def test_status_names_the_evidence_or_says_compile_only():
    assert checked(4).status == "run: fast.json"
    assert checked(3).status == "compile-only"


def test_evidence_may_cover_a_part_of_what_is_served():
    row = replace(TwoEngines.rows[0], shown={"width": OneOf((2,))})
    assert row.status({"width": 2}, HOPPER) == "run: fast.json"
    assert row.status({"width": 4}, HOPPER) == "compile-only"
    row = replace(row, beyond={"sm_90a": "wide.log"})
    assert row.status({"width": 2}, HOPPER) == "run: fast.json"
    assert row.status({"width": 4}, HOPPER) == "run: wide.log"


def test_decline_names_the_fact_the_value_and_what_is_served():
    row = TwoEngines.rows[0]
    assert row.decline({"width": 4}, HOPPER) is None
    assert row.decline({"width": 3}, HOPPER) == "width=3 (served: 2, 4)"
    assert row.decline({"width": 4}, AMPERE) == "target=sm_80 (served: sm_90a)"
    assert row.status({"width": 4}, AMPERE) is None


def test_a_decline_lists_the_engines_of_the_target():
    with pytest.raises(NotServedError) as declined:
        toy(1).check()
    error = declined.value
    assert error.stage == "toy"
    assert error.missing == "fast: width=1 (served: 2, 4); wide: width=1 (served: 2 and up)"
    assert error.served == (
        "fast on sm_90a with width 2, 4 | wide on sm_80, sm_90a with width 2 and up"
    )
    assert str(error) == f"toy: {error.missing} is not served; served: {error.served}"


def test_the_reference_is_never_chosen_for_a_gpu():
    with pytest.raises(NotServedError):
        toy(1, AMPERE).check()


@pytest.mark.parametrize(
    ("width", "target", "engine", "reason"),
    [
        (3, HOPPER, "fast", r"fast: width=3 \(served: 2, 4\)"),
        (4, AMPERE, "fast", r"fast: target=sm_80 \(served: sm_90a\)"),
        (4, HOPPER, "reference", r"reference: target=sm_90a \(served: cpu\)"),
        (4, HOPPER, "unheard_of", "engine=unheard_of"),
    ],
)
def test_a_pinned_engine_never_becomes_another(width, target, engine, reason):
    with pytest.raises(NotServedError, match=reason):
        toy(width, target, engine).check()


def test_a_pin_passes_over_a_preferred_engine():
    assert checked(4, HOPPER, "wide").engine == "wide"


def test_report_has_every_engine_and_never_raises():
    report = checked(3).report()
    assert (report.engine, report.status, report.smem_bytes) == ("wide", "compile-only", 640)
    assert [(row.engine, row.served, row.reason) for row in report.engines] == [
        ("fast", False, "width=3 (served: 2, 4)"),
        ("wide", True, None),
        ("reference", False, "target=sm_90a (served: cpu)"),
    ]
    unchecked = toy(1).report()
    assert (unchecked.engine, unchecked.status, unchecked.smem_bytes) == (None, None, None)


def test_engine_before_check_is_our_bug():
    with pytest.raises(AssertionError, match="toy: engine asked for before check"):
        _ = toy(4).engine


@pytest.fixture
def dsl(monkeypatch):
    return lambda version: monkeypatch.setattr(toolchain, "dsl_version", lambda: version)


@pytest.mark.parametrize("version", ["4.8.1", "4.8.1.dev0", "4.8.2", "4.9.0", "4.10", "5.0.0"])
def test_new_enough(dsl, version):
    dsl(version)
    assert DslRequirement((4, 8, 1)).decline() is None


@pytest.mark.parametrize("version", ["4.8.0", "4.7.9", "4.5", "3.9.9"])
def test_too_old_names_the_version(dsl, version):
    dsl(version)
    reason = f"nvidia-cutlass-dsl {version} (served: 4.8.1 and up)"
    assert DslRequirement((4, 8, 1)).decline() == reason


def test_missing(dsl):
    dsl(None)
    reason = "nvidia-cutlass-dsl not installed (served: 4.8.1 and up)"
    assert DslRequirement((4, 8, 1)).decline() == reason


def test_the_version_is_the_distributions():
    assert dsl_version() == importlib.metadata.version(DSL_DISTRIBUTION)


def test_no_distribution_is_none(monkeypatch):
    monkeypatch.setattr(toolchain, "DSL_DISTRIBUTION", "no-such-distribution-at-all")
    dsl_version.cache_clear()
    try:
        assert dsl_version() is None
    finally:
        dsl_version.cache_clear()
