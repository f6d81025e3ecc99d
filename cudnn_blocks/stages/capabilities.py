# SPDX-License-Identifier: Apache-2.0
"""Capabilities: one row per engine, as data. The only statement of what an engine serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cudnn_blocks.stages.toolchain import DslRequirement
from cudnn_blocks.target import Target

COMPILE_ONLY = "compile-only"

Facts = Mapping[str, object]
"""What a stage is asked to do: fact name to value, such as ``{"width": 4, "dtype": "bf16"}``."""


class Constraint(Protocol):
    """A set of served values that can print itself."""

    def __contains__(self, value: object) -> bool: ...


@dataclass(frozen=True)
class OneOf:
    """A finite set of values."""

    values: tuple[object, ...]

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return ", ".join(str(value) for value in self.values)


@dataclass(frozen=True)
class AtLeast:
    """Integers from ``low`` on."""

    low: int

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int) and value >= self.low

    def __str__(self) -> str:
        return f"{self.low} and up"


@dataclass(frozen=True)
class Capabilities:
    """What one engine of a stage serves, and how each target was validated."""

    engine: str
    targets: OneOf
    """Target names."""
    serves: Mapping[str, Constraint]
    """Fact name to the values served; a fact without a constraint is served whatever its value."""
    dsl: DslRequirement | None = None
    """CuTe DSL release that the engine needs, or None."""
    evidence: Mapping[str, str] = field(default_factory=dict)
    """Target name to the committed file that shows it ran there; other targets are compile-only."""
    shown: Mapping[str, Constraint] = field(default_factory=dict)
    """Of ``serves``, what the evidence covers."""
    beyond: Mapping[str, str] = field(default_factory=dict)
    """Evidence of what lies outside of ``shown``; compile-only without one."""

    def decline(self, facts: Facts, target: Target) -> str | None:
        """Why this row does not serve ``facts`` on ``target``; None where it does."""
        if target.name not in self.targets:
            return f"target={target.name} (served: {self.targets})"
        for name, served in self.serves.items():
            if facts[name] not in served:
                return f"{name}={facts[name]} (served: {served})"
        return self.dsl.decline() if self.dsl is not None else None

    def status(self, facts: Facts, target: Target) -> str | None:
        """``run: <evidence file>`` or ``compile-only``; None for a target outside the row."""
        if target.name not in self.targets:
            return None
        is_shown = all(facts[name] in values for name, values in self.shown.items())
        evidence = (self.evidence if is_shown else self.beyond).get(target.name)
        return f"run: {evidence}" if evidence else COMPILE_ONLY

    def __str__(self) -> str:
        facts = "; ".join(f"{name} {served}" for name, served in self.serves.items())
        return f"{self.engine} on {self.targets}" + (f" with {facts}" if facts else "")
